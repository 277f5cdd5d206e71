"""From a row's columns to the text that is trained on: plain text, conversations, prompts with completions.

Which columns are there decides (the `text` column's name is `--text-field`):

| columns | trained text |
|---|---|
| `text` | all of it; documents are packed |
| `messages`, or ShareGPT's `conversations` | the chat template, or `DEFAULT_CHAT_TEMPLATE`; the assistant's turns |
| `prompt`, `completion` | the two joined as they are, the completion; where both are lists of messages, as above |
| `instruction`, `input` (may be missing or empty), `output` | Alpaca's wording; the output |
| `instruction`, `context` (may be missing or empty), `response` | Dolly's columns in Alpaca's wording; the response |

`--train-on all` trains on the prompts too. A text is handed on in segments, (text, trained), which are tokenized
together (seams.py). An end-of-text token follows and is trained like the segment that it ends, or generation would
never stop.

If the tokenizer begins every text with a beginning-of-text token (Llama's and Gemma's do, GPT-2's does not), texts
begin with it here too. A chat template writes it itself, if its author wants it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem.data.answers import Answers
from lowmem.data.conversations import (
    UntrainableRow,
    encodable,
    read_conversation,
    read_prompt_and_completion,
)
from lowmem.data.seams import Segments
from lowmem.data.sources import Record
from lowmem.errors import InputError

# No space after the last colon: GPT-2's vocabulary joins a space with the word that follows it.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ (message['role'] | capitalize) ~ ': ' ~ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_DEFAULT_CHAT_TEMPLATES = (DEFAULT_CHAT_TEMPLATE, "{{ bos_token }}" + DEFAULT_CHAT_TEMPLATE)
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_ALPACA_WITH_INPUT = ", paired with an input that provides further context"
_STRUCTURED = {
    **{name: (name,) for name in ("messages", "conversations")},
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "dolly": ("instruction", "response"),
}


@dataclass(frozen=True)
class Format:
    """How the rows of one source are read. `packed`: documents may be cut and joined; otherwise one row is one example.
    `segments` gives a row's text and raises InputError or UntrainableRow with the row's place. `begin`: ids that stand
    before each text."""

    summary: str
    packed: bool
    segments: Callable[[Record], Segments]
    answers: Answers | None = None
    begin: tuple[int, ...] = ()

    @property
    def description(self) -> str:
        """The summary, and what has to be said of the rows that have been read."""
        return "; ".join([self.summary, *(self.answers.notes if self.answers else ())])


def find_format(record: Record, text_field: str, train_on: str, tokenizer: PreTrainedTokenizerBase) -> Format:
    """The format that the columns of `record` (a source's first) say. Raises InputError where they say none or two.

    A tokenizer without a chat template is given the default one, so that the exported model carries what it learnt.
    """
    found = [name for name, columns in _STRUCTURED.items() if record.columns.keys() >= set(columns)]
    begin = _beginning_of_text(tokenizer)
    if text_field in record.columns and (not found or text_field != "text"):
        begin = () if begin == (tokenizer.eos_token_id,) else begin  # the end of one document then begins the next
        return Format("text", True, lambda row: [(_filled(row, text_field), True)], begin=begin)
    ignored = ""
    if "text" in record.columns and found == ["alpaca"]:
        ignored = "; the column text beside them is not used"  # Alpaca's own files bring their rendering along
    elif len(found) != 1 or "text" in record.columns:
        _refuse(record, text_field, found)
    everything = train_on == "all"
    if found[0] in ("messages", "conversations") or (
        found == ["prompt"] and isinstance(record.columns["prompt"], list)
    ):
        return _conversations(found[0], everything, tokenizer)
    trained = "trained on every token" if everything else "trained on the completions"
    if found == ["prompt"]:
        return Format(
            f"prompt + completion, {trained}",
            False,
            lambda row: [(_string(row, "prompt"), everything), (_filled(row, "completion"), True)],
            begin=begin,
        )
    given, answer = ("input", "output") if found == ["alpaca"] else ("context", "response")
    return Format(
        f"instruction + {answer} in Alpaca's wording{ignored}, {trained}",
        False,
        lambda row: [(_alpaca_prompt(row, given), everything), (_filled(row, answer), True)],
        begin=begin,
    )


def _conversations(column: str, everything: bool, tokenizer: PreTrainedTokenizerBase) -> Format:
    said = "the chat template"
    if not tokenizer.chat_template or tokenizer.chat_template in _DEFAULT_CHAT_TEMPLATES:
        tokenizer.chat_template = _DEFAULT_CHAT_TEMPLATES[_beginning_of_text(tokenizer) == (tokenizer.bos_token_id,)]
        said = "the default chat template ('User: ...' and 'Assistant: ...', the tokenizer has none)"
    finder = Answers(tokenizer)

    def segments(row: Record) -> Segments:
        conversation = read_prompt_and_completion(row) if column == "prompt" else read_conversation(row, column)
        messages = conversation.messages
        answers = [messages[index] for index in conversation.answers]
        if not messages or not (
            everything or any(message.get("content") or "tool_calls" in message for message in answers)
        ):
            raise UntrainableRow(
                f"{row.where}: the conversation has no answer of the assistant, so there is no token "
                f"to train on; remove the row"
            )
        return finder.segments(conversation, everything)

    names = "prompt + completion, as messages," if column == "prompt" else column
    trained = "trained on every token" if everything else "trained on the assistant's turns"
    return Format(f"{names} through {said}{finder.template.note}, {trained}", False, segments, finder)


def _beginning_of_text(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text."""
    whole, text = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
    return tuple(whole[: starts[0]]) if starts else ()


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
        f"(now {text_field}), or give messages, conversations, prompt + completion, instruction + input + output, or "
        f"instruction + context + response"
    )


def _string(record: Record, column: str) -> str:
    if column not in record.columns:
        raise InputError(f"{record.where}: the column {column}, which the first row has, is missing here")
    value = record.columns[column]
    if not isinstance(value, str):
        raise InputError(f"{record.where}: {column} must be text, not {_kind(value)}")
    return encodable(value, record.where, column)


def _filled(record: Record, column: str) -> str:
    text = _string(record, column)
    if not text:
        raise UntrainableRow(f"{record.where}: {column} is empty, so there is no token to train on; remove the row")
    return text


def _alpaca_prompt(record: Record, given: str) -> str:
    instruction = _string(record, "instruction")
    context = _string(record, given) if record.columns.get(given) is not None else ""
    prompt = _ALPACA.format(_ALPACA_WITH_INPUT if context else "") + f"### Instruction:\n{instruction}\n\n"
    return prompt + (f"### Input:\n{context}\n\n" if context else "") + "### Response:\n"


def _kind(value: Any) -> str:
    return "missing (null)" if value is None else type(value).__name__
