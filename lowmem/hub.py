"""The Hugging Face hub: is it reachable, and which models are in its cache?

The hub's clients retry for 23 to 45 seconds. So callers look into the cache first, and then ask the hub once, with this
time limit: by `is_reachable`, if the client has no limit of its own.
"""

import functools
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from lowmem.errors import first_line

TIMEOUT_SECONDS = 5.0


def is_reachable() -> bool:
    """True if the hub answers in time (through a proxy, if the environment names one)."""
    return why_unreachable() is None


@functools.cache
def why_unreachable() -> str | None:
    """Returns why the hub does not answer; None if it does. The hub is asked once in a process."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    question = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(question, timeout=TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return None  # it answered, if only to refuse
    except (OSError, ValueError, http.client.HTTPException) as error:
        return first_line(error)
    return None


def local_folder(model: str) -> Path | None:
    """Returns the folder with the files of `model`: the folder itself, or a hub name's in the cache; None without
    one."""
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir():
        return Path(model)
    for name in ("tokenizer_config.json", "config.json", "tokenizer.json", "vocab.json"):
        try:
            cached = try_to_load_from_cache(model, name)
        except ValueError:  # not a possible name on the hub
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None
