"""Small tokenizers, and chat templates that behave like those of well-known model families.

The templates are written for these tests; each shows one family's habits.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"

CORPUS = [
    "You are a helpful assistant. The user asks, the assistant answers with tools.",
    'system user assistant tool {"name": "search", "arguments": {"query": "flights to Oslo"}}',
    "<tool_call> </tool_call> <tool_response> </tool_response> Plan: Observation: Action:",
    "Thinking about the flight 0123456789 from Paris, then book it. café über naïve\n\n",
]

CHATML = """
{%- for m in messages -%}
<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# SmolLM2: a default system prompt inside the loop; tool_calls, tools and reasoning are ignored.
SMOL = """
{%- for m in messages -%}
{%- if loop.index0 == 0 and m.role != 'system' -%}
{{ '<|im_start|>system\\nYou are a small default helper<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# Qwen2.5: system and schemas ahead of the loop, tool results merged into one user turn.
QWEN = """
{%- set given = messages[0].content if messages[0].role == 'system' else 'You are the default.' -%}
{{ '<|im_start|>system\\n' ~ given }}
{%- if tools -%}
{{ '\\n\\n# Tools\\n<tools>' }}{% for t in tools %}{{ '\\n' ~ (t | tojson) }}{% endfor -%}
{{ '\\n</tools>' }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant' }}
{%- if m.content or not m.tool_calls %}{{ '\\n' ~ m.content }}{% endif -%}
{%- for c in m.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' }}
{{- (c.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# Qwen3: reasoning of the answers after the last user turn only; content is stripped.
THINKING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and not m.content.startswith('<tool_response>') -%}
{%- set ns.last = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' -%}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\\n' ~ m.reasoning_content.strip() ~ '\\n</think>\\n\\n' }}
{%- endif -%}
{{ m.content | trim }}
{%- for c in m.tool_calls or [] -%}
{%- if (loop.first and m.content) or not loop.first %}{{ '\\n' }}{% endif -%}
{{ '<tool_call>\\n' ~ ({'name': c.function.name, 'arguments': c.function.arguments} | tojson)
   ~ '\\n</tool_call>' }}
{%- endfor -%}
{%- else -%}
{{ m.content }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# Llama 3: BOS, trimmed contents, content beside a tool call dropped, tools ahead of the first
# user text, arguments as text.
LLAMA3 = """
{{- bos_token -}}
{%- set rest = messages -%}
{%- if messages[0].role == 'system' -%}
{{ '<|start|>system<|end|>\\n\\n' ~ messages[0].content | trim ~ '<|eot|>' }}
{%- set rest = messages[1:] -%}
{%- endif -%}
{%- if tools and rest -%}
{{ '<|start|>user<|end|>\\n\\nAnswer with one of these functions.\\n' }}
{%- for t in tools %}{{ (t | tojson(indent=2)) ~ '\\n' }}{% endfor -%}
{{ rest[0].content | trim ~ '<|eot|>' }}
{%- set rest = rest[1:] -%}
{%- endif -%}
{%- for m in rest -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('One call at a time.') }}{% endif -%}
{{ '<|start|>assistant<|end|>\\n\\n{"name": "' ~ m.tool_calls[0].function.name ~
   '", "parameters": ' + m.tool_calls[0].function.arguments + '}<|eot|>' }}
{%- elif m.role == 'tool' -%}
{{ '<|start|>ipython<|end|>\\n\\n' ~ (m.content | tojson) ~ '<|eot|>' }}
{%- else -%}
{{ '<|start|>' ~ m.role ~ '<|end|>\\n\\n' ~ m.content | trim ~ '<|eot|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif -%}
"""

# Mistral: strict alternation, the system text inside the last user turn, schemas ahead of it.
MISTRAL = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set sys = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list -%}
{%- set ns = namespace(i=0) -%}
{%- for m in rest -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.i % 2 == 0) -%}
{{ raise_exception('Roles must alternate user, assistant, user, ...') }}
{%- endif -%}{%- set ns.i = ns.i + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{%- if tools and m == users[-1] %}{{ '[TOOLS] ' ~ (tools | tojson) ~ '[/TOOLS]' }}{% endif -%}
{%- if loop.last and sys is defined -%}
{{ '[INST] ' ~ sys ~ '\\n\\n' ~ m.content ~ '[/INST]' }}
{%- else -%}{{ '[INST] ' ~ m.content ~ '[/INST]' }}{%- endif -%}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{ '[CALLS] [' }}
{%- for c in m.tool_calls if c.id | length != 9 %}{{ raise_exception('Ids of 9!') }}{% endfor -%}
{%- for c in m.tool_calls %}{{ (c.function | tojson) ~ (']' if loop.last else ', ') }}{% endfor -%}
{{ eos_token }}
{%- elif m.role == 'assistant' -%}{{ ' ' ~ m.content ~ eos_token }}
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 -%}
{{ raise_exception('Ids of 9!') }}
{%- endif -%}{{ '[RESULTS] ' ~ m.content ~ ' ' ~ m.tool_call_id ~ '[/RESULTS]' }}
{%- else -%}{{ raise_exception('Only user, assistant and tool roles are supported.') }}
{%- endif -%}
{%- endfor -%}
"""

# Gemma: no system role of its own (merged into the first user turn), `model`, trimmed contents,
# strict alternation, no tools.
GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set lead = messages[0].content ~ '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set lead = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate') }}
{%- endif -%}
{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' }}
{{- (lead if loop.first else '') ~ (m.content | trim) ~ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

GEMMA_NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + GEMMA
)

# Phi: tags as roles, an end-of-text at the very end unless an answer is opened.
PHI = """
{%- for m in messages -%}
{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif -%}
"""

# DeepSeek: the system text ahead of all, calls only when the content is null and as text, tool
# results in one block that the next message closes, thinking of answers cut off.
DEEPSEEK = """
{%- set ns = namespace(system='', open=false) -%}
{%- for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor -%}
{{ bos_token ~ ns.system }}
{%- macro close() -%}
{%- if ns.open %}{% set ns.open = false %}{{ '<results_end>' }}{% endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{%- if m.role != 'tool' %}{{ close() }}{% endif -%}
{%- if m.role == 'user' %}{{ '<User>' ~ m.content }}
{%- elif m.role == 'assistant' and m.content is none -%}
{{ '<Assistant>' }}
{%- for c in m.tool_calls -%}
{{ '<call>' + c.function.name + '\n' + c.function.arguments + '<call_end>' }}
{%- endfor -%}
{{ eos_token }}
{%- elif m.role == 'assistant' -%}
{{ '<Assistant>' ~ m.content.split('</think>')[-1] ~ eos_token }}
{%- elif m.role == 'tool' -%}
{%- if not ns.open %}{% set ns.open = true %}{{ '<results>' }}{% endif -%}
{{ '<result>' ~ m.content ~ '<result_end>' }}
{%- endif -%}
{%- endfor -%}
{{ close() }}
{%- if add_generation_prompt %}{{ '<Assistant>' }}{% endif -%}
"""

# Only parts, as some vision models have it; a loop over indices instead of messages.
PARTS = """
{%- for m in messages -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' }}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
"""

BY_INDEX = """
{%- for i in range(messages | length) -%}
{{ '<|im_start|>' ~ messages[i].role ~ '\\n' ~ messages[i].content ~ '<|im_end|>\\n' }}
{%- endfor -%}
"""

TEMPLATES = {
    "chatml": CHATML,
    "smol": SMOL,
    "qwen": QWEN,
    "thinking": THINKING,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": PHI,
    "deepseek": DEEPSEEK,
    "parts": PARTS,
    "by_index": BY_INDEX,
}

_SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]
_PLAIN = ["<tool_call>", "</tool_call>"]


@functools.cache
def _backend(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    alphabet = []
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # SentencePiece with byte fallback, as Mistral's and Llama 2's
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1),
            ]
        )
        alphabet = []
    specials = ["<unk>", *_SPECIAL]
    if kind != "bytes":
        specials += [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(_PLAIN)
    return tokenizer


def make_tokenizer(template: str, kind: str = "bytes") -> PreTrainedTokenizerFast:
    """Return a small fast tokenizer with a chat template (a name of TEMPLATES, or a source)."""
    backend = Tokenizer.from_str(_backend(kind).to_str())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


def one_shot(tokenizer: Any, messages: list[Any], **options: Any) -> str:
    """Return what transformers itself renders."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def models_dir() -> Path:
    return Path(os.environ.get("MEMDECAY_MODELS") or Path.home() / ".cache/memdecay/models")


@functools.cache
def real_tokenizer(pattern: str) -> Any:
    """Return the tokenizer of a GGUF file whose name matches, or None."""
    from transformers import AutoTokenizer

    folder = models_dir()
    files = [f for f in sorted(folder.glob("*.gguf")) if re.search(pattern, f.name)]
    if not files:
        return None
    try:
        import gguf  # noqa: F401
    except ImportError:
        return None
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=files[0].name)


def call(name: str, arguments: Any, call_id: str = "abc123xyz") -> dict[str, Any]:
    """Return one OpenAI tool call."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
