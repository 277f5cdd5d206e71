"""Checks whether the Hugging Face hub answers, and finds models in the hub's local cache.

The hub's own client retries for 23 to 45 seconds. So callers look into the cache first, and then make one request with
a time limit.
"""

import functools
from contextlib import suppress
from pathlib import Path

from lowmem.errors import first_line

TIMEOUT_SECONDS = 5.0
_OWNER = "openai-community/"
GPT2S = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def names_of(model: str) -> tuple[str, ...]:
    """Returns the names under which the hub's cache may have `model`. One of OpenAI's GPT-2 models has two names: with
    its owner (openai-community/gpt2) and, in older caches, without (gpt2). For any other model, and for a folder,
    returns only `model`."""
    short = model.removeprefix(_OWNER)
    if Path(model).is_dir() or (short == model and model not in GPT2S):
        return (model,)
    return _OWNER + short, short


@functools.cache
def why_unreachable() -> str | None:
    """Returns the reason why the Hugging Face hub does not answer within TIMEOUT_SECONDS. Returns None if it answers.
    Asks only once per process."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)  # any answer counts, even a refusal
    except Exception as error:  # the client's errors differ from version to version
        return first_line(error)
    return None


def local_folder(model: str) -> Path | None:
    """Returns the folder that has the files of `model`: the path `model` itself, or a folder of the hub's cache.
    Returns None if there is neither."""
    if Path(model).is_dir():
        return Path(model)
    return next(filter(None, map(cached_folder, names_of(model))), None)


def cached_folder(name: str) -> Path | None:
    """Returns the folder of the hub's cache with files of the model `name`; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not a possible name on the hub
        for file in ("tokenizer_config.json", "config.json", "tokenizer.json", "vocab.json"):
            if isinstance(cached := try_to_load_from_cache(name, file), str):
                return Path(cached).parent
    return None
