"""Chat templates: those of real models that travel inside the package trl, and small ones for what they do not do."""

import importlib.util
import re
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from lowmem.data.answers import Answers
from lowmem.data.conversations import Conversation
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.errors import InputError
from tests.data.loading import END, POINTER, load, tokens_of, trained_text, write_rows

TRL = importlib.util.find_spec("trl")  # its folder, without importing it
FOLDER = Path(TRL.submodule_search_locations[0]) / "chat_templates" if TRL else Path("none")
OF_PICTURES = ("idefics3", "llava_next", "smolvlm")  # take content as a list of parts alone; no such model is trained
FILES = [file for file in sorted(FOLDER.glob("*.jinja")) if file.stem.removesuffix("_training") not in OF_PICTURES]
TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in FILES}
TRAINING = [name for name in TEMPLATES if name.endswith("_training")]  # TRL's variants, which mark answers
ORIGINAL = [name for name in TEMPLATES if name not in TRAINING]

CHAT = [
    {"role": "user", "content": "What is 2?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "Three."},
]
ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
WITH_TOOLS = [
    {"role": "user", "content": "2 and 3?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "id": "call12345", "function": ADD}]},
    {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "five"},
    {"role": "assistant", "content": "They are 5."},
]
NUMBER = {"type": "integer", "description": "a number"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]

# What is trained on of CHAT. Where both answers are the words and one end of turn, that end.
ENDS = {
    "<|im_end|>\n": "lfm2 lfm2_v2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl qwen2_5 qwen2_5_vl qwen3_instruct_2507 qwen3_vl "
    "qwen3_5_nothink",
    "<|END_OF_TURN_TOKEN|>": "cohere",
    "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>": "cohere2",
    "<｜end▁of▁sentence｜>": "deepseek_r1_distill deepseekv3",
    "<turn|>\n": "diffusion_gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5",
    "<end_of_turn>\n": "gemma gemma3",
    "<|eot_id|>": "llama3 llama3_1 llama3_2",
}
TRAINED = {name: [f"Two.{end}", f"Three.{end}"] for end, names in ENDS.items() for name in names.split()} | {
    # The end of the text follows the last end of turn.
    **dict.fromkeys(("phi3", "phi3_5"), ["Two.<|end|>\n", "Three.<|end|>\n<|endoftext|>"]),
    # The model chooses where its message goes.
    "gptoss": ["<|channel|>final<|message|>Two.<|end|>", "<|channel|>final<|message|>Three.<|return|>"],
    "muse_glimmer": [" to=user<|message|>Two.<|eot|>", " to=user<|message|>Three.<|eot|>"],
    # What begins the next turn ends this one; the last is ended by the end of the text, which packing adds.
    "glm4moe": ["\n<think></think>\nTwo.<|user|>", "\n<think></think>\nThree."],
    # Old turns are without reasoning. In the last one it is empty here, and the prompt may have begun it.
    "qwen3": ["Two.<|im_end|>\n", "<think>\n\n</think>\n\nThree.<|im_end|>\n"],
    **dict.fromkeys(("qwen3_5_think", "qwen3_6"), ["Two.<|im_end|>\n", "\n</think>\n\nThree.<|im_end|>\n"]),
    "qwen3_8": ["\n</think>\n\nTwo.<|im_end|>\n", "\n</think>\n\nThree.<|im_end|>\n"],
    **dict.fromkeys(
        ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
        ["</think>Two.<|im_end|>\n", "</think>Three.<|im_end|>\n"],
    ),
}

# What the templates that train no tools say.
LEFT_OUT = "leaves out tool calls"
NO_TOOLS = {
    **dict.fromkeys(("lfm2", "llama3", "qwen2_5_vl"), LEFT_OUT),
    **dict.fromkeys(("cohere2", "gemma", "gemma3"), "refuses the conversation .*must alternate"),
    **dict.fromkeys(("cohere", "phi3", "phi3_5"), "refuses the conversation .*content"),
}


def bytes_with(template):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(template):
    """Bytes, and every special token that the template writes."""
    tokenizer = bytes_with(template)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.add_tokens(sorted(set(re.findall(r"</?[|｜]?[A-Za-z][\w▁]*[|｜]?>", template))), special_tokens=True)
    return tokenizer


def loaded(tmp_path, tokenizer, *conversations, **options):
    """The data of CHAT, or of these conversations."""
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in conversations or (CHAT,)])
    return load(path, tokenizer, len(tokenizer), **{"seq": 128, "batch": 1} | options)


def trained_pieces(name, messages, tools=None):
    answers = Answers(tokenizer_of(TEMPLATES[name]))
    segments = answers.segments(Conversation("a.jsonl:1", messages, tools), everything=False)
    assert not answers.notes
    return [text for text, trained in segments if trained]


@pytest.mark.skipif(not TRL, reason="trl is not installed")
def test_the_table_has_every_template():
    assert sorted(TRAINED) == ORIGINAL and len(TEMPLATES) > 55


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", ORIGINAL)
def test_the_template_of_a_real_model_trains_every_answer_and_its_end(name):
    assert trained_pieces(name, CHAT) == TRAINED[name]


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if "strftime_now" not in TEMPLATES[name]])
def test_the_whole_text_is_what_transformers_writes(name):
    tokenizer = tokenizer_of(TEMPLATES[name])
    for messages in (CHAT, CHAT[:3], [CHAT[0], {**CHAT[1], "reasoning_content": "One and one."}]):
        for everything in (True, False):
            segments = Answers(tokenizer).segments(Conversation("a.jsonl:1", messages), everything)
            expected = tokenizer.apply_chat_template(messages, tokenize=False)
            assert "".join(text for text, _ in segments) == expected


@pytest.mark.skipif(not TRL, reason="trl is not installed")
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "gemma"])
def test_a_template_whose_special_tokens_are_plain_text_to_the_tokenizer_trains_the_same(name):
    answers = Answers(bytes_with(TEMPLATES[name]))
    segments = answers.segments(Conversation("a.jsonl:1", CHAT), everything=False)
    assert [text for text, trained in segments if trained] == TRAINED[name] and not answers.notes


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", ORIGINAL)
def test_tool_calls_are_trained_and_what_tools_return_is_not_or_the_row_is_refused(name):
    if name in NO_TOOLS:
        with pytest.raises(InputError, match=f"a.jsonl:1: the chat template {NO_TOOLS[name]}.*--chat-template FILE"):
            trained_pieces(name, WITH_TOOLS, TOOLS)
        return
    call, answer = trained_pieces(name, WITH_TOOLS, TOOLS)
    assert "add" in call and "2" in call and "five" not in call + answer and "They are" not in call
    assert "They are 5." in answer and "add" not in answer


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", TRAINING)
def test_generation_marks_in_a_template_are_the_labels(tmp_path, name):
    tokenizer = tokenizer_of(TEMPLATES[name])
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    labels = loaded(tmp_path, tokenizer, seq=4096).train.batch(0).labels[0].tolist()
    marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    expected = [token if generated else -100 for token, generated in marked]
    assert labels[: len(expected) - 1] == expected[1:]


def test_a_tokenizers_own_template_is_used_and_its_end_is_not_doubled(tmp_path):
    tokenizer = bytes_with(
        "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    data = loaded(tmp_path, tokenizer, CHAT[:2], CHAT[:3], batch=2)
    batch = data.train.batch(0)
    assert trained_text(batch, 0) == "Two.$\n"
    assert trained_text(batch, 1) == "Two.$\n"  # the open question after it is not trained, nor its end
    assert "through the chat template" in data.description


def test_a_template_that_rewrites_old_turns_trains_the_last_one_and_says_so(tmp_path):
    tokenizer = bytes_with(
        "{% for m in messages %}[{{ m.role[0] }}]{{ m.content if loop.last or m.role == 'user' else m.content[:2] }};"
        "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    data = loaded(tmp_path, tokenizer, CHAT, CHAT[:2], batch=2)
    trained = [trained_text(data.train.batch(0), row) for row in (0, 1)]
    assert sorted(trained) == ["Three.;$", "Two.;$"]
    assert "only the last answer of 1 of them, since the chat template rewrites earlier ones" in data.description


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_everything_is_trained(tmp_path):
    tokenizer = bytes_with("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(InputError, match=r"a\.jsonl:1: .*--train-on all"):
        loaded(tmp_path, tokenizer)
    train = loaded(tmp_path, tokenizer, train_on="all").train
    assert trained_text(train.batch(0)) == "What is 2?Two.And 3?Three.$"


@pytest.mark.skipif(not TRL, reason="trl is not installed")
@pytest.mark.parametrize(
    ("name", "left_out"), [("deepseek_r1_distill", True), ("qwen2_5", False), ("qwen3", False), ("llama3", False)]
)
def test_reasoning_that_a_template_leaves_out_of_the_last_answer_is_counted(tmp_path, name, left_out):
    tokenizer = tokenizer_of(TEMPLATES[name])
    thoughtful = [CHAT[0], {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nTwo."}]
    said = "leaves out the reasoning of the last answer in 1 of them; --chat-template FILE"
    assert (said in loaded(tmp_path, tokenizer, thoughtful, CHAT, seq=1024).description) == left_out
    apart = [CHAT[0], {**CHAT[1], "reasoning_content": "One and one."}]
    assert (said in loaded(tmp_path, tokenizer, apart, CHAT, seq=1024).description) == (name != "qwen3")


def test_a_system_message_and_tools_that_a_template_leaves_out_are_counted(tmp_path):
    tokenizer = bytes_with(
        "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    system = {"role": "system", "content": "Be kind."}
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [system, *CHAT], "tools": TOOLS}, {"messages": CHAT}])
    said = load(path, tokenizer, seq=128, batch=1).description
    for name in ("the system message", "the list of tools"):
        assert f"the chat template leaves out {name} in 1 of them; --chat-template FILE" in said


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{% if m.role == 'gpt' %}{{ m.content }}{% endif %}{% endfor %}",
    "{% for m in conversation %}{{ m.content }}{% endfor %}", "{% for m in messages %}<{{ m.role }}>{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
])  # fmt: skip
@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_a_template_without_the_answers_is_refused(tmp_path, template, train_on):
    with pytest.raises(InputError, match=r"a\.jsonl:1: the chat template does not write the assistant's answers"):
        loaded(tmp_path, bytes_with(template), train_on=train_on)


@pytest.mark.parametrize(("end", "trained"), [
    ("{{ eos_token }}", "Two.$Three.$"), ("<end>", "Two.<end>Three.<end>\n$"), ("", "Two.Three.\n$"),
])  # fmt: skip
def test_behind_generation_marks_a_text_ends_once_and_that_end_is_trained(tmp_path, end, trained):
    tokenizer = bytes_with(
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        + end
        + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    train = loaded(tmp_path, tokenizer).train
    assert trained_text(train.batch(0)) == trained
    assert tokens_of(train)[-2:] == ([END, ord("\n")] if "eos" in end else [ord("\n"), END])


def test_generation_marks_around_nothing_are_none(tmp_path):
    """Seen to fail: no example had a token to train on, whatever its length."""
    tokenizer = bytes_with(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert trained_text(loaded(tmp_path, tokenizer).train.batch(0)) == "Two.Three.$"


def test_a_template_that_asks_for_the_date_is_told_the_same_one_always(tmp_path):
    tokenizer = bytes_with(
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    data = loaded(tmp_path, tokenizer, CHAT[:2])
    assert bytes(data.train.batch(0).input_ids[0].tolist()).startswith(b"26 Jul 2024[user]")
    assert "told that today is 2024-07-26" in data.description and "strftime_now" in tokenizer.chat_template


def test_chat_template_file_is_used_and_left_on_the_tokenizer(tmp_path):
    tokenizer, file = byte_level_tokenizer(), tmp_path / "chat.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}A{% generation %}{{ m.content }}.{% endgeneration %}"
        "{% else %}U{{ m.content }}{% endif %}{% endfor %}"
    )
    batch = loaded(tmp_path, tokenizer, chat_template=str(file)).train.batch(0)
    assert trained_text(batch) == "Two..Three..$" and tokenizer.chat_template == file.read_text()


def test_a_chat_template_without_conversations_is_said_to_be_only_exported(tmp_path):
    """Seen to fail: it was not said."""
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    texts = write_rows(tmp_path / "t.jsonl", [{"text": "x" * 40}])
    prompts = write_rows(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}])
    chats = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}])
    for specs, said in (([texts, prompts], True), ([texts, chats], False), ([texts], True)):
        data = load(specs, chat_template=str(tmp_path / "chat.jinja"))
        assert data.description.endswith("no data set has conversations, so it is only exported with the model") == said
    assert "--chat-template" not in load(texts).description


@pytest.mark.parametrize(("content", "message"), [
    (None, r"chat.jinja: cannot be read \(No such file"), (b"one\n{% if %}", r"chat.jinja:2: not a Jinja template"),
    (b"one\n\xff", r"chat.jinja:2: not UTF-8"), (POINTER.encode(), r"chat.jinja is a Git LFS pointer"),
])  # fmt: skip
def test_a_missing_or_broken_chat_template_file_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "chat.jinja").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        loaded(tmp_path, byte_level_tokenizer(), chat_template=str(tmp_path / "chat.jinja"))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_what_a_template_raises_is_said_with_the_row(tmp_path):
    tokenizer = bytes_with("{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(
        InputError, match=r"a\.jsonl:1: the chat template refuses the conversation \(Roles must alternate\)"
    ):
        loaded(tmp_path, tokenizer)


# The beginning-of-text token


def llama_like():
    """Bytes, with <s> before every text that is tokenized with special tokens."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    first = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[first])
    return tokenizer


def test_texts_and_examples_begin_as_the_tokenizer_begins_them(tmp_path):
    tokenizer = llama_like()
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer("a")["input_ids"] == [start, ord("a")]
    texts = write_rows(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "<s>two is long enough"}])
    assert tokens_of(load(texts, tokenizer, 258).train) == [start, *b"one", end, start, *b"two is long enough", end]
    (tmp_path / "long.txt").write_text("a line\n" * 2**18)  # read in pieces
    assert tokens_of(load(tmp_path / "long.txt", tokenizer, 258).train).count(start) == 1
    pairs = write_rows(tmp_path / "b.jsonl", [{"prompt": "p", "completion": "c"}])
    batch = load(pairs, tokenizer, 258, batch=1).train.batch(0)
    assert batch.input_ids[0].tolist() == [start, *b"pc"] and batch.labels[0].tolist() == [-100, *b"c", end]
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chats = write_rows(tmp_path / "c.jsonl", [{"messages": CHAT[:2]}])
    assert tokens_of(load(chats, tokenizer, 258, seq=64).train).count(start) == 1
    tokenizer.chat_template = None  # the default template writes it, too
    assert tokens_of(load(chats, tokenizer, 258, seq=64).train)[:3] == [start, *b"Us"]


def test_one_end_of_text_lies_between_packed_texts_where_it_begins_them_too(tmp_path):
    tokenizer = byte_level_tokenizer()
    first = ("<|endoftext|>", 256)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[first])
    texts = write_rows(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two is long enough"}])
    assert tokens_of(load(texts, tokenizer).train) == [*b"one", 256, *b"two is long enough", 256]


def test_gpt_2_texts_begin_with_nothing(tmp_path, gpt2_tokenizer):
    text = "a text, " * 9
    texts = write_rows(tmp_path / "a.jsonl", [{"text": text}])
    assert tokens_of(load(texts, gpt2_tokenizer, 50257).train) == [*gpt2_tokenizer(text)["input_ids"], 50256]
