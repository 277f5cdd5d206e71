"""Turns a row's columns into segments, pairs (text, True if trained on). A row is plain text, a conversation, or a
prompt with its completion; the columns of the data set's first row decide which of these (docs/data.md)."""

import itertools
from collections.abc import Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from lowmem.data.answers import Answers
from lowmem.data.conversations import UntrainableRow, encodable, parse_within, read_conversation, string, system_text
from lowmem.data.records import Reading, Record
from lowmem.data.seams import Segments
from lowmem.data.tables import LABEL_COLUMNS, SYSTEM_COLUMNS, used_columns
from lowmem.errors import InputError

# No space follows the last colon, because GPT-2's vocabulary joins a space with the next word.
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
_QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input")  # usual names, likeliest first
_ANSWERS = ("completion", "answer", "response", "output", "solution", "target")
_MOST_NAMED = 20  # columns that a message names
_MOST_BLANK = 10_000  # rows that are searched for the first one with a value


class Format:
    """Converts the rows of one data set to text. `first`: the first row. `needed`: columns that every row must have.
    `everything`: prompts are trained on, too."""

    packed = False  # documents may be cut and joined; otherwise each row is one example
    chat = False  # rows are rendered with the chat template
    more: tuple[str, ...] = SYSTEM_COLUMNS  # columns that are used if a row has them
    summary = ""
    notes: list[str] | tuple = ()

    def __init__(self, first: Record, needed: tuple[str, ...], everything: bool, tokenizer: PreTrainedTokenizerBase):
        self._first, self._needed, self._everything, self._tokenizer = first, needed, everything, tokenizer
        self.begin = _beginning_of_text(tokenizer)
        self.rivals: list[tuple[str, ...]] = []  # columns of other formats; a row that also fills these is refused
        self._unused: dict[str, None] = {}  # columns in the order in which they were seen

    @property
    def description(self) -> str:
        unused = [f"columns not used: {_listed(self._unused)}"] if self._unused else []
        return "; ".join(filter(None, [self.summary, *self.notes, *unused]))

    def segments(self, record: Record) -> Segments:
        """Returns a row's segments, (text, True if trained on). Raises UntrainableRow if there is nothing to train on,
        and InputError for a row of another format."""
        for name in record.columns:
            if name not in self._needed and name not in self.more:
                self._unused[name] = None
        for name in self._needed:
            if name not in record.columns:
                raise InputError(
                    f"{record.where}: the column {name}, which the first row ({self._first.where}) has, is missing here"
                )
        for columns in self.rivals:
            if _are_filled(record, columns):
                raise _in_two_ways(record, (self._needed, columns))
        return self.write(record)

    def write(self, row: Record) -> Segments:
        """Returns the segments of `row`, (text, True if trained on). Subclasses define this."""
        raise NotImplementedError

    def _trained(self, on: str) -> str:
        return "trained on every token" if self._everything else f"trained on the {on}"


class _Text(Format):
    packed, more = True, ()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.begin == (self._tokenizer.eos_token_id,):
            self.begin = ()  # the end of one document also begins the next

    def write(self, row: Record) -> Segments:
        return [(_filled(row, self._needed[0]), True)]


class _Prompts(Format):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.summary = f"{' + '.join(self._needed)}, {self._trained('completions')}"
        if getattr(arguments[-1], "chat_template", None):
            self.summary += "; they are joined without the model's chat template, which only messages use"

    def write(self, row: Record) -> Segments:
        asked, answered = self._needed
        prompt = "\n\n".join(filter(None, [system_text(row), string(row, asked)]))
        return [(prompt, self._everything), (_filled(row, answered), True)]


class _Alpaca(Format):
    """Writes Alpaca's columns (`instruction`, `input`, `output`) or Dolly's in the wording of Alpaca's prompts."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._answer = self._needed[1]
        names = ("input", "context") if self._answer == "output" else ("context", "input")
        self._given = next((name for name in names if name in self._first.columns), names[0])
        self.more = (self._given, "history", *SYSTEM_COLUMNS)
        self.summary = f"instruction + {self._answer} in Alpaca's wording, {self._trained('completions')}"

    def write(self, row: Record) -> Segments:
        given = string(row, self._given) if row.columns.get(self._given) is not None else ""
        opening = _ALPACA.format(_ALPACA_WITH_INPUT if given else "")
        if system := system_text(row):
            opening = f"{system}\n\n"
        segments = []
        for question, reply in _history(row):
            segments += [(f"{opening}### Instruction:\n{question}\n\n### Response:\n", self._everything)]
            segments += [(reply + self._tokenizer.eos_token, True)]
            opening = "\n\n"
        prompt = f"{opening}### Instruction:\n{string(row, 'instruction')}\n\n"
        prompt += f"### Input:\n{given}\n\n" if given else ""
        return [*segments, (f"{prompt}### Response:\n", self._everything), (_filled(row, self._answer), True)]


class _Conversations(Format):
    """Renders messages with the chat template. If the tokenizer has none, sets a default one, which is exported."""

    chat = True
    more = (*SYSTEM_COLUMNS, "tools", "functions")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        tokenizer, said = self._tokenizer, "the chat template"
        if not tokenizer.chat_template or tokenizer.chat_template in _DEFAULT_CHAT_TEMPLATES:
            tokenizer.chat_template = _DEFAULT_CHAT_TEMPLATES[self.begin == (tokenizer.bos_token_id,)]
            said = "the default chat template ('User: ...' and 'Assistant: ...', the tokenizer has none)"
        self.begin = ()  # the template writes these tokens
        self._answers = Answers(tokenizer)
        names = self._needed[0] if len(self._needed) == 1 else f"{' + '.join(self._needed)}, as messages,"
        trained = self._trained("assistant's turns")
        self.summary = f"{names} through {said}{self._answers.template.note}, {trained}"

    @property
    def notes(self) -> list[str]:
        return self._answers.notes

    def write(self, row: Record) -> Segments:
        conversation = read_conversation(row, self._needed, str(self._tokenizer.chat_template))
        answers = [conversation.messages[index] for index in conversation.answers]
        said = any(message.get("content") or "tool_calls" in message for message in answers)
        if not conversation.messages or not (self._everything or said):
            raise UntrainableRow(
                f"{row.where}: the conversation has no answer of the assistant, so there is no token "
                f"to train on; remove the row"
            )
        return self._answers.segments(conversation, self._everything)


def _formats(reading: Reading) -> list[tuple[tuple[str, ...], type[Format], bool]]:
    """Lists all formats: (columns that a row needs, class, True if an option has renamed one of these columns).
    `reading`: has the columns' names, which options may have set."""
    usual, pair = Reading(), (reading.prompt, reading.completion)
    return [
        ((reading.messages,), _Conversations, reading.messages != usual.messages),
        (("conversations",), _Conversations, False),
        (pair, _Prompts, pair != (usual.prompt, usual.completion)),
        (("instruction", "output"), _Alpaca, False),
        (("instruction", "response"), _Alpaca, False),
        ((reading.text,), _Text, reading.text != usual.text),
    ]


def with_first_filled(records: Iterator[Record], reading: Reading) -> tuple[Record | None, Iterable[Record]]:
    """Returns (record that decides the data format, iterator over all records); for no records, (None, iterator). The
    first record that is not blank decides; if all of the first _MOST_BLANK are blank, the last of these. A record is
    blank if it has columns that some format uses, and all of these are null. `reading`: has the columns' names."""
    seen: list[Record] = []
    for record in itertools.islice(records, _MOST_BLANK):
        seen.append(record)
        used = used_columns(record.columns, reading)
        if not used or any(record.columns[name] is not None for name in used):
            break
    return (seen[-1] if seen else None), itertools.chain(seen, records)


def find_format(record: Record, reading: Reading, train_on: str, tokenizer: PreTrainedTokenizerBase) -> Format:
    """Returns the Format of a data set, by the columns of `record` (from `with_first_filled`). Prefers formats with a
    column that an option names (`reading`). Raises InputError if no format fits, or if several do."""
    found = [each for each in _formats(reading) if record.columns.keys() >= {*each[0]}]
    named = [each for each in found if each[2]]
    if not named and any(kind is _Alpaca for _, kind, _ in found):
        found = [each for each in found if each[1] is not _Text]  # Alpaca's own files have the rendered text, too
    found = named or found
    filled = [each for each in found if _are_filled(record, each[0])] if len(found) > 1 else found
    if len(filled) > 1:
        raise _in_two_ways(record, [columns for columns, _, _ in found])
    if not filled:
        raise _unreadable(record, reading)
    needed, kind, _ = filled[0]
    if kind is not _Text:
        _refuse_labels(record)
    if kind is _Prompts and any(isinstance(record.columns[name], list) for name in needed):
        kind = _Conversations
    format = kind(record, needed, train_on == "all", tokenizer)
    format.rivals = [columns for columns, _, _ in found if columns != needed]
    return format


def refuse_unused_names(firsts: list[Record], reading: Reading) -> None:
    """Raises InputError if an option names a column by which no data set can be read. `firsts`: each data set's first
    row. `reading`: has the columns' names. Does nothing if no format at all fits a data set, which `find_format`
    refuses with advice."""
    tables = [first for first in firsts if first.named]
    fitting = [
        [columns for columns, _, _ in _formats(reading) if first.columns.keys() >= {*columns}] for first in tables
    ]
    if not all(fitting):
        return
    usable = {column for formats in fitting for columns in formats for column in columns}
    usable |= {reading.text} if not tables else set()  # texts have no columns, so --text-field does not matter
    pair = {reading.prompt: reading.completion, reading.completion: reading.prompt}
    for option, column in reading.named.items():
        if firsts and column not in usable:
            place = f" next to {pair[column]}" if column in pair else ""
            columns = _listed(dict.fromkeys(name for first in tables for name in first.columns))
            raise InputError(f"{option} {column}: no data set has this column{place}; the columns are {columns}")


def _beginning_of_text(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the ids of the special tokens that the tokenizer puts before a text."""
    whole, text = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
    begin = tuple(whole[: starts[0]]) if starts else ()
    if None in (tokens := tokenizer.convert_ids_to_tokens(begin)):
        raise InputError(
            f"the tokenizer gives token id {begin[tokens.index(None)]} before a text, and has no such token"
        )
    return begin


def _are_filled(record: Record, columns: Iterable[str]) -> bool:
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


def _unreadable(record: Record, reading: Reading) -> InputError:
    names = record.columns
    asked, answered = (next((name for name in known if name in names), None) for known in (_QUESTIONS, _ANSWERS))
    if {"chosen", "rejected"} <= {*names}:
        advice = (
            "chosen and rejected are for training on preferences, which is not done here; to train on the chosen "
            "answers, rename chosen to completion, next to a prompt, or to messages, if it lists them all"
        )
    elif "input_ids" in names:
        advice = "rows that are tokenized already are not read; give their text"
    elif asked and answered:
        named = [(asked, reading.prompt, "--prompt-field"), (answered, reading.completion, "--completion-field")]
        advice = "give " + " and ".join(f"{option} {name}" for name, now, option in named if name != now)
    else:
        advice = (
            f"name the text with --text-field (now {reading.text}), or give messages, conversations, prompt + "
            f"completion, instruction + input + output, or instruction + context + response"
        )
    return InputError(f"{record.where}: nothing to train on in the columns ({_listed(names)}); {advice}")


def _refuse_labels(record: Record) -> None:
    for column in LABEL_COLUMNS:
        value = record.columns.get(column)
        in_words = isinstance(value, str) and value.strip().lower() in ("true", "false")  # CSV
        if isinstance(value, bool) or in_words or (column == "kto_tag" and value in (0, 1, "0", "1")):
            raise InputError(
                f"{record.where}: {column} marks answers as good or bad (KTO), and bad ones would be trained on, too; "
                f"keep the rows with good ones, and remove that column"
            )


def _filled(record: Record, column: str) -> str:
    text = string(record, column)
    if not text:
        raise UntrainableRow(f"{record.where}: {column} is empty, so there is no token to train on; remove the row")
    return text


def _history(record: Record) -> list[list[str]]:
    """Returns a row's earlier turns as pairs [instruction, response]. A CSV file has them as JSON text."""
    turns = record.columns.get("history")
    if isinstance(turns, str):
        turns = parse_within(turns, record.where, "history is") if turns.strip() else []
    pairs = [list(turn) if isinstance(turn, list | tuple) else [] for turn in turns] if isinstance(turns, list) else []
    if not isinstance(turns, list | None) or any([type(text) for text in pair] != [str, str] for pair in pairs):
        raise InputError(f"{record.where}: history must be a list of pairs of texts, [instruction, response]")
    return [[encodable(text, record.where, "history") for text in pair] for pair in pairs]
