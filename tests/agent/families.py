"""Byte-level BPE tokenizers trained here, with the control tokens and the chat template of a model family."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

TEMPLATES = tuple(
    sorted(
        path.name.removesuffix(".jinja")
        for path in (files("trl") / "chat_templates").iterdir()
        if path.name.endswith(".jinja")
    )
)
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_TOKEN = re.compile(
    r"\[/?[A-Z_]{3,}\]|<[|\uff5c][^|\uff5c'\"{}\s]{1,30}[|\uff5c]>|<(?:start_of_turn|end_of_turn|end_of_utterance|sop)>|\[gMASK\]|"
    r"</?(?:think|tool_call|tool_response|s)>|<\|?(?:turn|tool|tool_call|tool_response|channel|think)\|?>"
)


# Not shipped by trl: what the models' own templates do with turns, shortened.
SHORTENED = {
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
        "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
        "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}</s>"
        "{% elif m.tool_call_id | length != 9 or messages[loop.index0 - 1].role == 'assistant' and not "
        "messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call has this id') }}"
        "{% else %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]{% endif %}"
        "{% endfor %}"
    ),
    "deepseek_v31": (
        "{{ bos_token }}{% set ns = namespace(asked=false) %}{% for m in messages %}{% if m.role == 'system' %}"
        "{{ m.content }}{% elif m.role == 'user' %}{% set ns.asked = true %}<\uff5cUser\uff5c>{{ m.content }}"
        "{% elif m.role == 'assistant' %}{% if ns.asked %}<\uff5cAssistant\uff5c></think>{% endif %}"
        "{% set ns.asked = false %}{{ m.content }}<\uff5cend\u2581of\u2581sentence\uff5c>{% else %}"
        "<\uff5ctool\u2581output\u2581begin\uff5c>{{ m.content }}<\uff5ctool\u2581output\u2581end\uff5c>{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt and ns.asked %}<\uff5cAssistant\uff5c></think>{% endif %}"
    ),
}


def template(name: str) -> str:
    if name in SHORTENED:
        return SHORTENED[name]
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


@cache
def _trained() -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    split = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    return str(backend.to_str())


@cache
def tokenizer_for(name: str) -> Any:
    """The tokenizer of one of `TEMPLATES`: every control token that its template writes is an added token."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend, text = Tokenizer.from_str(_trained()), template(name)
    tokens = sorted({*_TOKEN.findall(text), "<|bos|>", "<|eos|>"})
    special = [AddedToken(token, normalized=False, special=True) for token in tokens if token not in ORDINARY]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens if token in ORDINARY])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>", bos_token="<|bos|>")
    tokenizer.chat_template = text
    return tokenizer
