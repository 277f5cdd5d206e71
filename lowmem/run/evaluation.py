"""Evaluates the loss on held-out texts during training, and generates samples of text."""

import math
import os
from contextlib import suppress

import torch

from lowmem.core.decoder import Decoder
from lowmem.core.encoder_decoder import decoder_start
from lowmem.core.step import StepAbandoned, TrainingStep
from lowmem.data.batches import Batches
from lowmem.data.chat_templates import ChatTemplate
from lowmem.errors import InputError, first_line
from lowmem.fields import each
from lowmem.models.build import most_positions
from lowmem.run.figures import Best, best_evaluation
from lowmem.run.folder import checkpoint_of
from lowmem.run.prepare import Session
from lowmem.run.signals import StopRequest

SAMPLE_TOKENS = 64


def evaluated(session: Session) -> dict:
    """Returns the held-out losses for a row of metrics.jsonl: `eval_loss`, in nats per token, and with several texts
    also `eval_losses`, {name of the text: loss}. Returns {} if nothing is held out."""
    limit = session.settings.eval_batches
    with session.budget.phase("evaluate"):
        sums = {text.parts[0].name: summed_loss(session.step, text, limit) for text in session.data.evaluations}
    if not sums:
        return {}
    losses, tokens = zip(*sums.values(), strict=True)
    row = {"eval_loss": math.fsum(losses) / sum(tokens)}
    if len(sums) > 1:
        row["eval_losses"] = {name: loss / tokens for name, (loss, tokens) in sums.items()}
    return row


def due(session: Session, done: int) -> bool:
    """Returns True if the held-out loss must be evaluated after step `done`, counted from 1."""
    every = session.settings.eval_every or session.steps
    return bool(session.data.evaluations) and (done == session.steps or done % every == 0)


def is_missing(session: Session) -> bool:
    """Returns True if the held-out loss must be evaluated before training begins or goes on."""
    done = session.model.done
    if done == 0 or not session.resumed:
        return not session.resumed
    # In a resumed run, a signal or an error may have prevented the evaluation after its newest step.
    rows = session.log.rows
    return bool(rows) and rows[-1]["step"] == done and "eval_loss" not in rows[-1] and due(session, done)


def evaluated_after(session: Session, stop: StopRequest, done: int) -> dict:
    """Returns the held-out losses after step `done`, for its row of metrics.jsonl. Returns {} if a second signal, such
    as Ctrl-C, interrupts the evaluation. After the last step, or with several ranks (processes), no signal does."""
    if done == session.steps:
        session.step.abandoned = None
        stop.now("the last evaluation, then saving and the export", "changes nothing")
    else:
        skips = "skips it and saves" if session.ranks.count == 1 else "changes nothing"
        stop.now(f"the evaluation after step {done}, then saving", skips)
    with suppress(StepAbandoned):
        return evaluated(session)
    return {}


def out_of_patience(session: Session) -> bool:
    """Returns True if the last --patience evaluations found no lower held-out loss than those before; False without
    --patience."""
    patience = session.settings.patience
    return patience is not None and best_evaluation(session.log.rows, session.eval_first).since >= patience


def best_kept(session: Session, done: int) -> Best:
    """Returns the evaluation with the lowest held-out loss, among that of step `done` and those of steps whose
    checkpoints exist. Returns step 0 with the loss NaN if none of these steps was evaluated."""

    def find() -> Best:
        kept = {done, *(step for step in session.saved if os.path.exists(checkpoint_of(session.folder, step)))}
        return best_evaluation([row for row in session.log.rows if row["step"] in kept], None)

    return session.ranks.on_first(find)


def take_samples(session: Session, done: int, last: bool = False) -> None:
    """Logs the model's continuation of each --sample-prompt after `done` steps. `last`: True to show the first sample
    of each prompt again."""
    prompts = each(session.settings.sample_prompt)
    if not prompts:
        return
    session.step.flush()
    with session.budget.phase("evaluate"):
        for prompt in prompts:
            text = sample(
                session.model.decoder, session.model.tokenizer, prompt, chat=session.data.chat,
                temperature=session.settings.sample_temperature, seed=session.settings.seed,
                alone=session.ranks.count == 1,
            )  # fmt: skip
            session.log.sample(done, text, last, prompt)
    if session.step.store.device.type == "cuda":
        torch.cuda.empty_cache()  # so that steps allocate where they did before


@torch.no_grad()
def sample(
    decoder: Decoder, tokenizer, prompt: str, chat: bool = False, temperature: float = 0.0, seed: int = 0,
    alone: bool = True,
) -> str:  # fmt: skip
    """Returns "sample: " plus a generated text, or "no sample: " plus the reason. The text continues `prompt` by at
    most SAMPLE_TOKENS tokens; a decoder's text begins with `prompt`. `chat`: True to ask `prompt` as a question in the
    chat template. `temperature`: 0 takes the likeliest token each time. Leaves torch's random generators unchanged.
    `alone`: False if other ranks (processes) wait for this one; then a RuntimeError is raised, not returned."""
    try:
        asked = ChatTemplate(tokenizer).question(prompt) if chat else prompt
    except InputError as error:
        return f"no sample: {error}"
    tokenized = tokenizer(asked, return_tensors="pt", add_special_tokens=not chat).to(decoder.head_weight.device)
    inputs = {name: tokenized[name] for name in ("input_ids", "attention_mask") if name in tokenized}
    end = tokenizer.eos_token_id
    tokens = inputs["input_ids"][0].tolist()
    if decoder.needs_sources:  # the prompt is a source, which ends as in training
        source = tokens if tokens[-1:] == [end] else [*tokens, end]
        config = decoder.model.config
        inputs = {
            "input_ids": inputs["input_ids"].new_tensor([source]), "decoder_start_token_id": decoder_start(config),
            "use_cache": config.num_decoder_layers <= config.num_layers,  # the cache has as many layers as the encoder
        }  # fmt: skip
    elif tokens[1:][-1:] == [end] and not prompt.endswith(tokenizer.eos_token):
        inputs = {name: values[:, :-1] for name, values in inputs.items()}  # the tokenizer has added this end
    prompt_tokens = inputs["input_ids"].shape[1]
    positions = most_positions(decoder.model.config) or 2**31
    if not 0 < prompt_tokens < positions:
        return f"no sample: --sample-prompt has {prompt_tokens} tokens, and the model takes 1 to {positions - 1}"
    decoder.model.eval()
    try:
        new_tokens = min(SAMPLE_TOKENS, positions - prompt_tokens)
        device = decoder.head_weight.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            # torch.manual_seed would seed other GPUs, too.
            (torch.cuda if device.type == "cuda" else torch.default_generator).manual_seed(seed)
            written = decoder.model.generate(
                **inputs, max_new_tokens=new_tokens, pad_token_id=end,
                **{"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False},
            )  # fmt: skip
    except (ValueError, TypeError, IndexError, RuntimeError) as error:  # each model has its own `generate`
        if isinstance(error, RuntimeError) and not alone:
            raise
        reason = first_line(error)
        return f"no sample: {f'out of memory ({reason})' if isinstance(error, torch.OutOfMemoryError) else reason}"
    # A decoder's end of text is shown; an encoder-decoder also writes padding.
    if chat and not decoder.needs_sources:
        answer = tokenizer.decode(written[0][prompt_tokens:], skip_special_tokens=True).strip()
        text = f"{prompt}\n{answer}" + " ..." * (len(written[0]) == prompt_tokens + new_tokens)
    else:
        text = tokenizer.decode(written[0], skip_special_tokens=decoder.needs_sources)
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"sample: {shown}"  # a terminal would obey control characters


def summed_loss(step: TrainingStep, batches: Batches, limit: int) -> tuple[float, int]:
    """Returns (summed loss in nats, number of tokens) for the tokens with a label in the first `limit` batches."""
    sums = [step.evaluate(batches.batch(index)) for index in range(min(limit, len(batches)))]
    return math.fsum(loss for loss, _ in sums), sum(tokens for _, tokens in sums)
