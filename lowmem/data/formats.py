"""From a row's columns to the text that is trained on: plain text, conversations, prompts with completions.

The columns of a source's first row decide (`--text-field` renames the `text` column).

| columns | trained text |
|---|---|
| `text` | all of it; documents are packed |
| `messages`, or ShareGPT's `conversations` | the chat template, or `DEFAULT_CHAT_TEMPLATE`; the assistant's turns |
| `prompt`, `completion` | the two joined as they are, the completion; if both are lists of messages, as above |
| `instruction`, `input` (may be missing or empty), `output` | Alpaca's wording; the output |
| `instruction`, `context` (may be missing or empty), `response` | Dolly's columns in Alpaca's wording; the response |

More columns are used, as in LLaMA-Factory and Axolotl.

| columns | in rows of | become |
|---|---|---|
| `system` (or `system_prompt`, `system_message`, `system_instruction`) | conversations without one | a message |
| | `prompt` + `completion` | the prompt's first paragraph |
| | Alpaca's and Dolly's | the text in place of the wording's first sentences |
| `history`, a list of pairs | Alpaca's and Dolly's | earlier instructions and responses, which are trained on, too |
| `tools`, or OpenAI's older `functions` | conversations | the tools given to the chat template |

All other columns are named in the line that describes the data. A null is no text: a column of nulls does not count.

`--train-on all` trains on the prompts too. A text is handed on in segments, (text, trained), which are tokenized
together (seams.py). An end-of-text token follows and is trained like the segment that it ends, or generation would
never stop.

If the tokenizer begins every text with a beginning-of-text token (Llama's and Gemma's do, GPT-2's does not), texts
begin with it here too. A chat template writes it itself, if its author wants it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from lowmem.data.answers import Answers
from lowmem.data.conversations import (
    UntrainableRow,
    encodable,
    parse_within,
    read_conversation,
    read_prompt_and_completion,
    system_text,
)
from lowmem.data.records import Record
from lowmem.data.seams import Segments
from lowmem.data.tables import LABEL_COLUMNS, SYSTEM_COLUMNS
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
_STRUCTURED = {  # the columns that each reading needs
    **{name: (name,) for name in ("messages", "conversations")},
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "dolly": ("instruction", "response"),
}
_QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input")  # other people's names, likeliest first
_ANSWERS = ("completion", "answer", "response", "output", "solution", "target")
_MOST_NAMED = 20  # columns, in one sentence
_MOST_BLANK = 10_000  # rows before the first one that is filled


@dataclass(frozen=True)
class Format:
    """How the rows of one source are read. `packed`: documents may be cut and joined; otherwise one row is one example.
    `write` gives a row's text and raises InputError or UntrainableRow with the row's place. `begin`: ids before each
    text. `needed`: columns that each row must have. `used`: all columns that are read. `rivals`: the columns of
    other formats; a row that fills them, too, is refused. `first`: the place of the row that decided."""

    summary: str
    packed: bool
    write: Callable[[Record], Segments]
    answers: Answers | None = None
    begin: tuple[int, ...] = ()
    needed: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()
    rivals: tuple[tuple[str, ...], ...] = ()
    first: str = ""
    unused: dict[str, None] = field(default_factory=dict)  # columns that were seen, in their order

    @property
    def description(self) -> str:
        """The summary, and notes on the rows that have been read."""
        said = [self.summary, *(self.answers.notes if self.answers else ())]
        said += [f"columns not used: {_listed(self.unused)}"] if self.unused else []
        return "; ".join(filter(None, said))

    def segments(self, record: Record) -> Segments:
        """The text of a row."""
        for name in (*record.columns, *record.unread):
            if name not in self.used:
                self.unused[name] = None
        for name in self.needed:
            if name not in record.columns:
                raise InputError(
                    f"{record.where}: the column {name}, which the first row ({self.first}) has, is missing here"
                )
        for columns in self.rivals:
            if _filled_columns(record, columns):
                raise _in_two_ways(record, (self.needed, columns))
        return self.write(record)


def with_first_filled(records: Iterator[Record]) -> tuple[Record | None, Iterable[Record]]:
    """The first of `records` with a value that is not null, and all records; None if there are no records."""
    seen: list[Record] = []
    for record in itertools.islice(records, _MOST_BLANK):
        seen.append(record)
        if record.unread or any(value is not None for value in record.columns.values()):
            break
    return (seen[-1] if seen else None), itertools.chain(seen, records)


def find_format(record: Record, text_field: str, train_on: str, tokenizer: PreTrainedTokenizerBase) -> Format:
    """The format that the columns of `record` (a source's first) say. Raises InputError where they say none or two.

    A tokenizer without a chat template is given the default one, so that the exported model carries what it learnt.
    """
    readings = _STRUCTURED | {"text": (text_field,)}
    found = [name for name, columns in readings.items() if record.columns.keys() >= {*columns}]
    if "text" in found and text_field != "text":
        found = ["text"]
    elif "text" in found and {"alpaca", "dolly"} & {*found}:
        found.remove("text")  # Alpaca's own files bring their rendering along
    filled = [name for name in found if _filled_columns(record, readings[name])] if len(found) > 1 else found
    if len(filled) > 1:
        raise _in_two_ways(record, [readings[name] for name in found])
    if not filled:
        raise _unreadable(record, text_field)
    name = filled[0]
    _refuse_labels(record, name)
    format, beside = _format(name, record, text_field, train_on == "all", tokenizer)
    return replace(
        format,
        needed=readings[name],
        used=frozenset((*readings[name], *beside)),
        rivals=tuple(readings[other] for other in found if other != name),
        first=record.where,
    )


def _format(
    name: str, record: Record, text_field: str, everything: bool, tokenizer: PreTrainedTokenizerBase
) -> tuple[Format, tuple[str, ...]]:
    """The format called `name`, and the columns that it uses but does not need."""
    begin = _beginning_of_text(tokenizer)
    if name == "text":
        begin = () if begin == (tokenizer.eos_token_id,) else begin  # the end of one document then begins the next
        return Format("", True, lambda row: [(_filled(row, text_field), True)], begin=begin), ()
    if name in ("messages", "conversations") or (
        name == "prompt" and any(isinstance(record.columns[column], list) for column in _STRUCTURED["prompt"])
    ):
        return _conversations(name, everything, tokenizer), (*SYSTEM_COLUMNS, "tools", "functions")
    trained = "trained on every token" if everything else "trained on the completions"
    if name == "prompt":

        def prompt(row: Record) -> str:
            return "\n\n".join(filter(None, [system_text(row), _string(row, "prompt")]))

        return Format(
            f"prompt + completion, {trained}",
            False,
            lambda row: [(prompt(row), everything), (_filled(row, "completion"), True)],
            begin=begin,
        ), SYSTEM_COLUMNS
    given, answer = ("input", "output") if name == "alpaca" else ("context", "response")
    if given not in record.columns and {"input", "context"} & record.columns.keys():
        given = "context" if name == "alpaca" else "input"
    return Format(
        f"instruction + {answer} in Alpaca's wording, {trained}",
        False,
        lambda row: _alpaca(row, given, answer, everything, tokenizer.eos_token),
        begin=begin,
    ), (given, "history", *SYSTEM_COLUMNS)


def _conversations(column: str, everything: bool, tokenizer: PreTrainedTokenizerBase) -> Format:
    said = "the chat template"
    if not tokenizer.chat_template or tokenizer.chat_template in _DEFAULT_CHAT_TEMPLATES:
        tokenizer.chat_template = _DEFAULT_CHAT_TEMPLATES[_beginning_of_text(tokenizer) == (tokenizer.bos_token_id,)]
        said = "the default chat template ('User: ...' and 'Assistant: ...', the tokenizer has none)"
    finder = Answers(tokenizer)

    def segments(row: Record) -> Segments:
        template = str(tokenizer.chat_template)
        if column == "prompt":
            conversation = read_prompt_and_completion(row, template)
        else:
            conversation = read_conversation(row, column, template)
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


def _filled_columns(record: Record, columns: Iterable[str]) -> bool:
    return all(record.columns.get(column) is not None for column in columns)


def _listed(names: Iterable[str]) -> str:
    shown = [name if name.isprintable() and name else repr(name) for name in names]
    more = [f"{len(shown) - _MOST_NAMED:,} more"] if len(shown) > _MOST_NAMED else []
    return ", ".join(shown[:_MOST_NAMED] + more) or "none"


def _in_two_ways(record: Record, readings: Iterable[Iterable[str]]) -> InputError:
    return InputError(
        f"{record.where}: the columns ({_listed(record.columns)}) can be read in more than one way "
        f"({' or '.join(' + '.join(columns) for columns in readings)}); remove or rename those that are not to be "
        f"trained on"
    )


def _unreadable(record: Record, text_field: str) -> InputError:
    names = (*record.columns, *record.unread)
    asked, answered = (next((name for name in known if name in names), None) for known in (_QUESTIONS, _ANSWERS))
    if {"chosen", "rejected"} <= {*names}:
        advice = (
            "chosen and rejected are for training on preferences, which is not done here; to train on the chosen "
            "answers, rename chosen to completion, beside a prompt, or to messages, if it lists them all"
        )
    elif "input_ids" in names:
        advice = "rows that are tokenized already are not read; give their text"
    elif asked and answered:
        renamed = [(asked, "prompt"), (answered, "completion")]
        advice = "rename " + " and ".join(f"{old} to {new}" for old, new in renamed if old != new)
    else:
        advice = (
            f"name the text with --text-field (now {text_field}), or give messages, conversations, prompt + "
            f"completion, instruction + input + output, or instruction + context + response"
        )
    return InputError(f"{record.where}: nothing to train on in the columns ({_listed(names)}); {advice}")


def _refuse_labels(record: Record, name: str) -> None:
    """InputError for rows with a label for good and bad answers: bad ones must not be trained on."""
    for column in LABEL_COLUMNS if name != "text" else ():
        if isinstance(record.columns.get(column), bool):
            raise InputError(
                f"{record.where}: {column} marks answers as good or bad (KTO), and bad ones would be trained on, too; "
                f"keep the rows with good ones, and remove that column"
            )


def _string(record: Record, column: str) -> str:
    value = record.columns[column]
    if value is None:
        raise UntrainableRow(f"{record.where}: {column} is empty (null); remove the row")
    if not isinstance(value, str):
        raise InputError(f"{record.where}: {column} must be text, not {type(value).__name__}")
    return encodable(value, record.where, column)


def _filled(record: Record, column: str) -> str:
    text = _string(record, column)
    if not text:
        raise UntrainableRow(f"{record.where}: {column} is empty, so there is no token to train on; remove the row")
    return text


def _alpaca(record: Record, given: str, answer: str, everything: bool, end_of_text: str) -> Segments:
    context = _string(record, given) if record.columns.get(given) is not None else ""
    begun = _ALPACA.format(_ALPACA_WITH_INPUT if context else "")
    if system := system_text(record):
        begun = f"{system}\n\n"
    segments = []
    for question, reply in _history(record):
        segments += [(f"{begun}### Instruction:\n{question}\n\n### Response:\n", everything)]
        segments += [(reply + end_of_text, True)]
        begun = "\n\n"
    prompt = f"{begun}### Instruction:\n{_string(record, 'instruction')}\n\n"
    prompt += f"### Input:\n{context}\n\n" if context else ""
    return [*segments, (f"{prompt}### Response:\n", everything), (_filled(record, answer), True)]


def _history(record: Record) -> list[list[str]]:
    """The earlier turns, [instruction, response] each; CSV has the list as JSON text."""
    turns = record.columns.get("history")
    if isinstance(turns, str):
        turns = parse_within(turns, record.where, "history is") if turns.strip() else []
    pairs = [list(turn) if isinstance(turn, list | tuple) else [] for turn in turns] if isinstance(turns, list) else []
    if not isinstance(turns, list | None) or any([type(text) for text in pair] != [str, str] for pair in pairs):
        raise InputError(f"{record.where}: history must be a list of pairs of texts, [instruction, response]")
    return [[encodable(text, record.where, "history") for text in pair] for pair in pairs]
