"""Rows as other trainers write them, and the files that hold them."""

import json

import pytest

from lowmem.data.conversations import read_conversation
from lowmem.data.records import Record
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.errors import InputError
from tests.data.loading import (
    CONVERSATION,
    END,
    in_order,
    load,
    shown,
    tokens_of,
    trained_text,
    write_rows,
    write_table,
)

CALL = {"name": "add", "arguments": {"a": 2}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools;{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def read(tmp_path, *rows, tokenizer=None, **options):
    """Returns (text, trained text) of each row as a batch has it, without the ends of text."""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    batch = in_order(path, tokenizer, seq=512, batch=len(rows), **options).batch(0)
    texts = ["".join(token for token, _ in shown(batch, row)).rstrip("$") for row in range(len(rows))]
    return [(text, trained_text(batch, row).rstrip("$")) for row, text in enumerate(texts)]


def messages_of(row, column="messages"):
    return read_conversation(Record("rows.jsonl:1", row), (column,)).messages


def test_sharegpt_rows_read_as_messages_and_a_system_column_is_said_first(tmp_path):
    speakers = ("human", "gpt", "user", "assistant")
    sharegpt = [{"from": name, "value": m["content"]} for name, m in zip(speakers, CONVERSATION, strict=True)]
    openai = {"messages": [{"role": "system", "content": "Be kind."}, *CONVERSATION]}
    expected = read(tmp_path, openai)
    assert expected[0][1] == " Hello$ See you"
    for row in (
        {"conversations": sharegpt, "system": "Be kind.", "id": 7},
        {"conversations": [{"from": "system", "value": "Be kind."}, *sharegpt], "system": "Be kind."},
        {"conversations": CONVERSATION, "system": "Be kind."},
    ):
        assert read(tmp_path, row) == expected
    assert messages_of({"conversations": sharegpt, "system": ""}, "conversations") == CONVERSATION


def test_calls_of_tools_read_alike_from_openais_new_and_older_and_sharegpts_rows(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    question, answer = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two"}
    returned = {"role": "tool", "content": "2", "tool_call_id": "1"}
    as_text = {"id": "1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
    schema = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    openai = [question, {"role": "assistant", "content": None, "tool_calls": [as_text]}, returned, answer]
    sharegpt = [
        {"from": "human", "value": "2?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "Two"},
    ]
    expected = [('1 tools;[user]2?;[assistant]<add {"a": 2}>;[tool]2;[assistant]Two;', '<add {"a": 2}>;Two;')]
    older = {"name": "add", "content": "2", "function_call": {"name": None, "arguments": None}}
    calling = {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"a": 2}'}}
    for row in (
        {"messages": openai, "tools": schema},
        {"messages": openai, "tools": json.dumps(schema)},
        {"messages": [question, calling, {"role": "function", **older}, answer], "functions": [schema[0]["function"]]},
        {"conversations": sharegpt, "tools": schema},
    ):
        assert read(tmp_path, row, tokenizer=tokenizer) == expected
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the chat template leaves out tool calls.*--chat-template"):
        read(tmp_path, {"messages": openai, "tools": schema})  # the default template knows none


@pytest.mark.parametrize(
    "untrained", [{"weight": 0}, {"loss": False}, {"train": False}, {"training": False}, {"loss": 0}, {"weight": "0"}]
)
def test_parts_of_text_are_joined_and_a_weight_of_0_is_not_trained(tmp_path, untrained):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    first = {"role": "assistant", "content": parts}
    rows = [{"messages": [CONVERSATION[0], first, *CONVERSATION[2:]]}]
    assert read(tmp_path, *rows) == read(tmp_path, {"messages": CONVERSATION})
    assert (
        read(tmp_path, {"messages": [CONVERSATION[0], {**first, **untrained}, *CONVERSATION[2:]]})[0][1] == " See you"
    )


def test_of_prompt_and_completion_as_messages_only_the_completion_is_trained(tmp_path):
    marked = byte_level_tokenizer()
    marked.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:{% generation %} {{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}User: {{ m.content }}\n\n{% endif %}{% endfor %}"
    )
    row = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    for tokenizer in (None, marked):
        assert read(tmp_path, row, tokenizer=tokenizer)[0][1] == " See you"
    everything = read(tmp_path, row, train_on="all")[0][1]
    assert everything == "ser: Hi\n\nAssistant: Hello$User: Bye\n\nAssistant: See you"


def of(content=None, **message):
    """Returns a row with one message of the user."""
    return {"messages": [{"role": "user", "content": content} | message]}


def calling(**function):
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


PAIR = {"prompt": "a", "completion": "b"}
SYSTEM = {"system": "Be kind."}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
RESPONSE = "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
IMAGE = [{"type": "image_url", "image_url": {}}]
BAD_ROWS = {
    "an image": (of(IMAGE), "messages, message 1: a part of kind image_url is not text"),
    "no role": ({"messages": [{"content": "Hi"}]}, "messages, message 1: there is no role"),
    "two roles": (of("a", **{"from": "gpt"}), "message 1: role and from differ"),
    "a weight of a half": (of("a", weight=0.5), "message 1: weight is 0.5; .*0 or false"),
    "a loss in words": (of("a", loss="maybe"), "message 1: loss is 'maybe'; .*0 or false"),
    "a list as training": (of("a", train=[1]), r"message 1: train is \[1\]; .*0 or false"),
    "two contents": (of("a", value="b"), "message 1: content and value differ"),
    "no content": (of(), "message 1: there is no content"),
    "a number as content": (of(5), "message 1: content must be text or a list of parts"),
    "half a pair of a surrogate": (of("\ud800"), "message 1: content holds half a surrogate"),
    "a bad call": (
        {"conversations": [{"from": "function_call", "value": "add(2)"}]},
        "conversations, message 1: function_call is not JSON",
    ),
    "bad arguments": (calling(name="add", arguments="2)"), "message 1: the arguments of add are not JSON"),
    "a call without a name": (calling(), "message 1: a tool call must be an object"),
    "bad tools": ({"messages": CONVERSATION, "tools": ["add"]}, "tools must be a list of objects"),
    "a text as completion": ({"prompt": CONVERSATION[:1], "completion": "a"}, "completion must be a list of objects"),
    "nobody answers": ({"prompt": CONVERSATION[:2], "completion": CONVERSATION[:1]}, "no answer of the assistant"),
    "two readings": ({"messages": [], "conversations": []}, r"more than one way \(messages or conversations\)"),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"chosen and rejected are .*rename chosen to"),
    "KTO": (PAIR | {"label": False}, r"label marks answers as good or bad"),
    "KTO in CSV": (PAIR | {"label": " False"}, r"label marks answers as good or bad"),
    "KTO of LLaMA-Factory": (ALPACA | {"kto_tag": True}, r"kto_tag marks answers"),
    "KTO in numbers": (ALPACA | {"kto_tag": 1}, r"kto_tag marks answers"),
    "a tool that calls": (
        {"messages": [{"role": "tool", "tool_calls": [CALL]}, *CONVERSATION]}, "refuses the conversation|leaves out",
    ),
    "question": ({"question": "a", "answer": "b"}, r"give --prompt-field question and --completion-field answer"),
    "query": ({"query": "a", "response": "b", "id": 1}, r"give --prompt-field query and --completion-field response"),
    "response": ({"prompt": "a", "response": "b"}, r"; give --completion-field response$"),
    "OpenOrca": ({"system_prompt": "s", "question": "a", "response": "b"}, "give --prompt-field question"),
    "tokens": ({"input_ids": [1, 2], "labels": [1, 2]}, "rows that are tokenized already are not read"),
    "two systems": (ALPACA | {"system": "a", "system_prompt": "b"}, "system and system_prompt hold different texts"),
    "a number": (ALPACA | {"system": 5}, "system must be text, not int"),
    "history": (ALPACA | {"history": [["a"]]}, "history must be a list of pairs"),
    "history of nulls": (ALPACA | {"history": [["a", None]]}, "history must be a list of pairs"),
    "history as text": (ALPACA | {"history": "a, b"}, "history is not JSON"),
    "half a pair": (ALPACA | {"system": "\ud800"}, "system holds half a surrogate pair"),
    "deep": ({"messages": CONVERSATION, "tools": "[" * 99_999}, "tools is not JSON .*nested too deeply"),
    "given twice": ({"messages": CONVERSATION, "tools": '{"a": 1, "a": 2}'}, "tools is not JSON .*'a' is given twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused_with_its_place(tmp_path, case):
    row, message = BAD_ROWS[case]
    with pytest.raises(InputError, match=rf"rows\.jsonl:1: .*{message}") as caught:
        read(tmp_path, row)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_keys_that_arrow_fills_with_null_are_not_trained(tmp_path):
    """A table gives all objects of a column the same keys: the calls of two tools have the arguments of both."""
    calls = [("weather", {"city": "Rome"}), ("stock", {"ticker": "A", "n": 2})]
    rows = [
        {
            "messages": [CONVERSATION[0], {"role": "assistant", "tool_calls": [{"name": name, "arguments": given}]}],
            "tools": [{"function": {"name": name, "parameters": {name: {"type": "string"} for name in given}}}],
        }
        for name, given in calls
    ]
    template = TOOL_TEMPLATE.replace("tools | length", "tools | tojson")
    tokenizers = [byte_level_tokenizer() for _ in range(3)]
    for tokenizer in tokenizers:
        tokenizer.chat_template = template
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    paths = [write_rows(tmp_path / "a.jsonl", rows), write_table(tmp_path / "a.parquet", rows), tmp_path / "saved"]
    texts = [
        bytes(token for token in tokens_of(load(path, tokenizer, seq=512, batch=1).train) if token < END).decode()
        for path, tokenizer in zip(paths, tokenizers, strict=True)
    ]
    assert all('<weather {"city": "Rome"}>' in text and '<stock {"ticker": "A", "n": 2}>' in text for text in texts)
    assert not any("null" in text for text in texts)


def test_a_row_with_nothing_but_an_id_does_not_decide_how_rows_are_read(tmp_path):
    rows = [{"id": 1, "text": None, "messages": None}, {"id": 2, "text": None, "messages": CONVERSATION}]
    with pytest.raises(InputError, match=r"rows\.jsonl:1: messages is empty \(null\); remove the row"):
        load(write_rows(tmp_path / "rows.jsonl", rows), seq=512)
    with pytest.raises(InputError, match=r"rows\.jsonl:1: nothing to train on in the columns \(id, words\)"):
        load(write_rows(tmp_path / "rows.jsonl", [{"id": 1, "words": "a"}, {"id": 2, "words": "b"}]))


def test_an_example_after_a_dropped_one_ends_with_the_end_of_text(tmp_path):
    dropped = {"prompt": "p" * 40, "completion": "x<|endoftext|>"}
    path = write_rows(tmp_path / "rows.jsonl", [dropped, {"prompt": "a", "completion": "\n"}])
    data = load(path, batch=1)
    assert tokens_of(data.train) == [*b"a\n", END] and "1 of these dropped" in data.description


# Files


@pytest.mark.parametrize(
    "content",
    [
        {"data": [{"text": "one"}, {"text": "and the second one"}]},
        {"version": 2, "tags": ["a"], "empty": [], "rows": [{"text": "one"}, {"text": "and the second one"}]},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_object_with_one_list_of_rows_is_that_list(tmp_path, content, indent):
    (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
    assert tokens_of(load(tmp_path / "a.json").train) == [*b"one", END, *b"and the second one", END]


def test_a_json_file_may_be_one_row_or_json_lines(tmp_path):
    row = {"messages": CONVERSATION}
    line = json.dumps(row)
    for content, rows in ((json.dumps(row, indent=1), 1), (line, 1), (f"\n{line}\n{line}", 2)):
        (tmp_path / "a.json").write_text(content)
        assert load(tmp_path / "a.json", seq=128, batch=1).train.rows == rows
    (tmp_path / "a.json").write_text(json.dumps({"a": [row], "b": [row]}))
    with pytest.raises(InputError, match=r"a\.json:1: nothing to train on in the columns \(a, b\)"):
        load(tmp_path / "a.json")


def test_a_pattern_reads_what_it_finds_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.md", "# second\n"), ("a.md", "# first one\n"), ("sub/c.md", "# third\n"), ("d.rst", "no")):
        (tmp_path / name).write_text(text)
    data = load(f"{tmp_path}/*.md")
    assert tokens_of(data.train) == [*b"# first one\n", END, *b"# second\n", END]
    assert load(f"{tmp_path}/**/*.md").train.parts[0].documents.tokens[-9:].tolist() == [*b"# third\n", END]
    assert "2 files (.rst left out)" in load(f"{tmp_path}/?.*").description.replace("3 files", "2 files")
    for pattern in ("*.rst", "*.txt"):
        with pytest.raises(InputError, match="the pattern finds no file of the kinds"):
            load(tmp_path / pattern)


# Columns beside them, roles, nulls


def test_alpaca_s_system_and_history_are_used(tmp_path):
    history = [["Hello", "AHOY"], ["Bye", "SO LONG"]]
    earlier = "### Instruction:\nHello\n\n### Response:\nAHOY$\n\n### Instruction:\nBye\n\n### Response:\nSO LONG$\n\n"
    plain = read(tmp_path, ALPACA)[0][0]
    opening = plain.removesuffix(f"{RESPONSE}3")
    assert opening.startswith("Below is an instruction") and opening.endswith("request.\n\n")
    without = read(tmp_path, ALPACA | {"input": "", "text": "its own rendering"})
    wording = opening.replace(", paired with an input that provides further context", "")
    assert without == [(f"{wording}### Instruction:\nAdd.\n\n### Response:\n3", "3")] and wording != opening
    for rows, expected in (
        (SYSTEM, f"Be kind.\n\n{RESPONSE}3"),
        ({"system_prompt": "Be kind."}, f"Be kind.\n\n{RESPONSE}3"),
        ({"history": history}, f"{opening}{earlier}{RESPONSE}3"),
        (SYSTEM | {"history": json.dumps(history)}, f"Be kind.\n\n{earlier}{RESPONSE}3"),
        ({"system": None, "history": None}, plain),
        ({"system": "", "history": []}, plain),
    ):
        assert read(tmp_path, ALPACA | rows)[0][0] == expected
        dolly = {"instruction": "Add.", "context": "1 2", "response": "3"}
        assert read(tmp_path, dolly | rows)[0][0] == expected
    assert read(tmp_path, ALPACA | {"history": history})[0][1] == "AHOY$SO LONG$3"
    assert read(tmp_path, {"instruction": "Add.", "context": "1 2", "output": "3"})[0][0] == plain


def test_a_system_column_is_said_before_prompts_of_both_kinds(tmp_path):
    texts = {"prompt": "Hi", "completion": " Hello"}
    lists = {"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:2]}
    messages = [{"role": "system", "content": "Be kind."}]
    for name in ("system", "system_prompt", "system_message", "system_instruction"):
        assert read(tmp_path, texts | {name: "Be kind."}) == [("Be kind.\n\nHi Hello", " Hello")]
        expected = read(tmp_path, lists | {"prompt": messages + CONVERSATION[:1]})
        assert read(tmp_path, lists | {name: "Be kind."}) == expected
        assert messages_of({"messages": CONVERSATION, name: "Be kind."}) == messages + CONVERSATION
    assert read(tmp_path, texts | {"system": None}) == read(tmp_path, texts)


@pytest.mark.parametrize(
    ("said", "role"),
    [
        *[(said, "user") for said in ("User", "USER:", "human", "Human", " prompter ")],
        *[(said, "assistant") for said in ("Assistant", "gpt", "GPT", "AI", "Chatbot", "model", "bing")],
        *[(said, "system") for said in ("System", "developer")],
        *[(said, "tool") for said in ("Tool", "ipython", "function", "observation")],
    ],
)
def test_other_spellings_of_roles_are_understood(said, role):
    assert messages_of({"messages": [{"role": said, "content": "a"}]})[0]["role"] == role


def test_roles_that_the_chat_template_names_stay_and_others_are_refused():
    for role in ("developer", "ipython", "critic"):
        record = Record("rows.jsonl:1", {"messages": [{"role": role, "content": "a"}]})
        assert read_conversation(record, ("messages",), f"{{% if m.role == '{role}' %}}").messages[0]["role"] == role
    with pytest.raises(InputError, match=r"rows\.jsonl:1: messages, message 1: the role 'critic' is not known; write"):
        messages_of({"messages": [{"role": "critic", "content": "a"}]})


@pytest.mark.parametrize(("rows", "count"), [
    ([{"text": "a" * 20}, {"text": None}, {"text": ""}], 2), ([{"text": None}, {"text": "a" * 20}], 1),
    ([PAIR, PAIR | {"prompt": None}, PAIR | {"completion": None}], 2),
    ([{"prompt": None, "completion": None}, {"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:2]}], 1),
    ([ALPACA, ALPACA | {"output": None}, ALPACA | {"instruction": None}], 2),
    ([{"messages": CONVERSATION}, {"messages": None}, {"messages": []}], 2),
    ([{"messages": CONVERSATION}, {"messages": [CONVERSATION[0], {"role": "assistant", "content": None}]}], 1),
    ([{"text": None, "messages": CONVERSATION}, {"text": None, "messages": CONVERSATION}], 0),
    ([{"text": None, "messages": None}, {"text": None, "messages": CONVERSATION}], 1),
])  # fmt: skip
def test_nulls_are_empty_and_a_column_of_nulls_is_no_second_reading(tmp_path, rows, count):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    data = load(tmp_path / "saved", seq=512 if "text" not in rows[-1] or "messages" in rows[-1] else 16)
    assert (f"{count} empty one" in data.description) == (count > 0)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    if count:
        with pytest.raises(InputError, match=r"rows\.jsonl:\d: .*(null|is empty|no answer|no content)"):
            load(path)


def test_a_second_reading_that_fills_later_is_refused_there(tmp_path):
    rows = [{"text": None, "messages": CONVERSATION}, {"text": "a", "messages": CONVERSATION}]
    with pytest.raises(InputError, match=r"rows\.jsonl:2: .*more than one way \(messages or text\)"):
        load(write_rows(tmp_path / "rows.jsonl", rows), seq=512)
    rows = [{"text": "a" * 20}, {"content": "b"}]
    with pytest.raises(InputError, match=r"rows\.jsonl:2: the column text, which the first row \(.*:1\) has"):
        load(write_rows(tmp_path / "rows.jsonl", rows))
