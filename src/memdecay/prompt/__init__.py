"""OpenAI chat messages become token ids and one region per token.

`Conversation` renders messages through the model's own chat template; `load_trace` reads recorded
conversations; `label_trace` sums one up. docs/mapping.md says which text gets which region.
"""

from memdecay.prompt.conversation import Conversation
from memdecay.prompt.label import label_messages
from memdecay.prompt.report import LabelledSpan, LabelReport, label_trace
from memdecay.prompt.traces import Trace, load_trace
from memdecay.prompt.types import Message, Recorded, Rendered, Span, Tokenizer
from memdecay.prompt.validate import validate_messages

__all__ = [
    "Conversation",
    "LabelReport",
    "LabelledSpan",
    "Message",
    "Recorded",
    "Rendered",
    "Span",
    "Tokenizer",
    "Trace",
    "label_messages",
    "label_trace",
    "load_trace",
    "validate_messages",
]
