"""Checks whether the Hugging Face hub answers, and finds models in the hub's local cache."""

import functools
from contextlib import suppress
from pathlib import Path

from lowmem.errors import first_line

# The hub's own client retries for 23 to 45 seconds. So callers look into the cache first, then ask once.
TIMEOUT_SECONDS = 5.0
_OWNER = "openai-community/"
GPT2S = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def names_of(model: str) -> tuple[str, ...]:
    """Returns the names under which the hub's cache may have `model`. OpenAI's GPT-2 models have two:
    openai-community/gpt2 and, in older caches, gpt2."""
    short = model.removeprefix(_OWNER)
    if Path(model).is_dir() or (short == model and model not in GPT2S):
        return (model,)
    return _OWNER + short, short


@functools.cache
def why_unreachable() -> str | None:
    """Returns the reason why the hub does not answer within TIMEOUT_SECONDS; None if it does. Asks once per process."""
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
    """Returns a local folder with the files of `model`: `model` itself, or its folder in the hub's cache; else None."""
    if Path(model).is_dir():
        return Path(model)
    return next(filter(None, map(cached_folder, names_of(model))), None)


def cached_folder(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not a possible name on the hub
        for file in ("tokenizer_config.json", "config.json", "tokenizer.json", "vocab.json"):
            if isinstance(cached := try_to_load_from_cache(name, file), str):
                return Path(cached).parent
    return None
