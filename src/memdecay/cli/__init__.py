"""The command line: one thin file a command; files with an underscore do the work."""
