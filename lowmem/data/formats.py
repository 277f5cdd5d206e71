"""From a row's columns to the text that is trained on: plain text, conversations, prompts with completions.

Which columns are there decides (the `text` column's name is `--text-field`):

| columns | trained text |
|---|---|
| `text` | all of it; documents are packed |
| `messages` | the tokenizer's chat template, or `DEFAULT_CHAT_TEMPLATE` where it has none; the assistant's turns |
| `prompt`, `completion` | the two joined as they are; the completion |
| `instruction`, `input` (may be missing or empty), `output` | Alpaca's wording; the output |

`--train-on all` trains on the prompts too. A text is handed on in segments, (text, trained), and each is tokenized by
itself: a generating model is given the prompt's tokens alone, so no token may straddle the place where its own words
begin. An end-of-text token follows and is trained like the segment that it ends, or generation would never stop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem.data.sources import Record
from lowmem.errors import InputError

Segments = list[tuple[str, bool]]

# No space after the last colon: GPT-2's vocabulary joins a space with the word that follows it.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ (message['role'] | capitalize) ~ ': ' ~ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_ALPACA_WITH_INPUT = ", paired with an input that provides further context"
_STRUCTURED = {"messages": ("messages",), "prompt": ("prompt", "completion"), "alpaca": ("instruction", "output")}


class UntrainableRow(InputError):
    """A row with nothing to learn from: an empty text or completion, a conversation without an answer."""


@dataclass(frozen=True)
class Format:
    """How the rows of one source are read. `packed`: documents may be cut and joined; otherwise one row is one example.
    `segments` gives a row's text and raises InputError or UntrainableRow with the row's place."""

    description: str
    packed: bool
    segments: Callable[[Record], Segments]


def find_format(record: Record, text_field: str, train_on: str, tokenizer: PreTrainedTokenizerBase) -> Format:
    """The format that the columns of `record` (a source's first) say. Raises InputError where they say none or two.

    A tokenizer without a chat template is given the default one, so that the exported model carries what it learnt.
    """
    found = [name for name, columns in _STRUCTURED.items() if record.columns.keys() >= set(columns)]
    if text_field in record.columns and (not found or text_field != "text"):
        return Format("text", True, lambda row: [(_filled(row, text_field), True)])
    ignored = ""
    if "text" in record.columns and found == ["alpaca"]:
        ignored = "; the column text beside them is not used"  # Alpaca's own files bring their rendering along
    elif len(found) != 1 or "text" in record.columns:
        _refuse(record, text_field, found)
    everything = train_on == "all"
    trained = "trained on every token" if everything else "trained on the completions"
    if found == ["prompt"]:
        return Format(
            f"prompt + completion, {trained}",
            False,
            lambda row: [(_string(row, "prompt"), everything), (_filled(row, "completion"), True)],
        )
    if found == ["alpaca"]:
        return Format(
            f"instruction + output in Alpaca's wording{ignored}, {trained}",
            False,
            lambda row: [(_alpaca_prompt(row), everything), (_filled(row, "output"), True)],
        )
    template = "the tokenizer's chat template"
    if not tokenizer.chat_template or tokenizer.chat_template == DEFAULT_CHAT_TEMPLATE:
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
        template = "the default chat template ('User: ...' and 'Assistant: ...', the tokenizer has none)"
    trained = "trained on every token" if everything else "trained on the assistant's turns"
    return Format(f"messages through {template}, {trained}", False, lambda row: _messages(row, train_on, tokenizer))


def _refuse(record: Record, text_field: str, found: list[str]) -> None:
    columns = ", ".join(record.columns) or "none"
    if found:
        sets = " or ".join(
            [" + ".join(_STRUCTURED[name]) for name in found] + (["text"] if "text" in record.columns else [])
        )
        raise InputError(
            f"{record.where}: the columns ({columns}) can be read in more than one way ({sets}); remove "
            f"or rename those that are not to be trained on"
        )
    raise InputError(
        f"{record.where}: nothing to train on in the columns ({columns}); name the text with --text-field "
        f"(now {text_field}), or give messages, prompt + completion, or instruction + output"
    )


def _string(record: Record, column: str) -> str:
    if column not in record.columns:
        raise InputError(f"{record.where}: the column {column}, which the first row has, is missing here")
    value = record.columns[column]
    if not isinstance(value, str):
        raise InputError(f"{record.where}: {column} must be text, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{record.where}: {column} holds half a surrogate pair ({value[error.start]!r}), which is no "
            f"character; write the character itself"
        ) from error
    return value


def _filled(record: Record, column: str) -> str:
    text = _string(record, column)
    if not text:
        raise UntrainableRow(f"{record.where}: {column} is empty, so there is no token to train on; remove the row")
    return text


def _alpaca_prompt(record: Record) -> str:
    instruction = _string(record, "instruction")
    context = _string(record, "input") if record.columns.get("input") is not None else ""
    prompt = _ALPACA.format(_ALPACA_WITH_INPUT if context else "") + f"### Instruction:\n{instruction}\n\n"
    return prompt + (f"### Input:\n{context}\n\n" if context else "") + "### Response:\n"


def _messages(record: Record, train_on: str, tokenizer: PreTrainedTokenizerBase) -> Segments:
    messages = record.columns.get("messages")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise InputError(f"{record.where}: messages must be a list of objects with the texts role and content")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not messages or (train_on == "completion" and not any(messages[index]["content"] for index in answers)):
        raise UntrainableRow(
            f"{record.where}: the conversation has no answer of the assistant, so there is no token "
            f"to train on; remove the row"
        )

    def render(count: int, ask: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # a template is a program of the model's author; it raises what it likes
            raise InputError(f"{record.where}: the chat template refuses the conversation ({error})") from error

    text = render(len(messages), ask=False)
    if train_on == "all":
        return [(text, True)]
    segments, start = [], 0
    for index in answers:
        before, after = render(index, ask=True), render(index + 1, ask=False)
        if not (text.startswith(before) and text.startswith(after)):
            raise InputError(
                f"{record.where}: the chat template rewrites earlier turns, so the assistant's tokens "
                f"cannot be told from the others; use --train-on all"
            )
        segments += [(text[start : len(before)], False), (text[len(before) : len(after)], True)]
        start = len(after)
    return [segment for segment in [*segments, (text[start:], False)] if segment[0]]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _kind(value: Any) -> str:
    return "missing (null)" if value is None else type(value).__name__
