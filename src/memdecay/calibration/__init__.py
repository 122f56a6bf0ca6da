"""Lifetimes from attention: measure traces, fit decay rates, write a profile (section IV)."""
