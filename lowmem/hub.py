"""Asks whether the Hugging Face hub answers, and finds models in its local cache.

The hub's own client retries for 23 to 45 seconds. So callers look into the cache first, then ask the hub once with a
time limit. `is_reachable` does this for clients that have no time limit.
"""

import functools
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from lowmem.errors import first_line

TIMEOUT_SECONDS = 5.0


def is_reachable() -> bool:
    """Returns True if the hub answers within TIMEOUT_SECONDS. Uses a proxy if the environment names one."""
    return why_unreachable() is None


@functools.cache
def why_unreachable() -> str | None:
    """Returns the reason why the hub does not answer; None if it does. Asks the hub only once per process."""
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
    """Returns the folder that holds the files of `model`. That is `model` itself if it is a folder, otherwise the hub's
    cache folder of this name. Returns None if there is neither."""
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
