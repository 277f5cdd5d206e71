"""Bytes per rank, worked out by hand, and against two processes that really train on gloo."""

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPTNeoConfig, LlamaConfig, OPTConfig

from experiments.memory_estimation.several_gpus import rank
from experiments.memory_estimation.several_gpus.more_blocks import BLOCKS, Operation, Placed, stretched
from experiments.memory_estimation.several_gpus.rank import METHODS, PLAIN, RankPeak, peak_of, record_blocks
from experiments.memory_estimation.several_gpus.recipe import place, prepare
from experiments.memory_estimation.several_gpus.tensor_parallel import keep_share
from lowmem.core.decoder import Decoder
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.tape import FREED
from lowmem.errors import InputError, LowmemError
from lowmem.models.build import build_model
from lowmem.planning.simulated_step import gpu_target
from tests import runs

T = 64
RTX3090 = gpu_target(CARDS["rtx3090"])
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
EXACTLY_BUT_SCALARS = 2048  # bytes: a loss's scalars, the handful of bytes that a collective keeps


def gpt2(**changes) -> GPT2Config:
    """No dropout: on the CPU its masks are of another type than on CUDA. 8 divides every first dimension."""
    shape = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 256, "vocab_size": 1000}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**{**shape, **no_dropout, "bos_token_id": 1, "eos_token_id": 1, **changes})


def llama(**changes) -> LlamaConfig:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1000}
    return LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, **changes)


def parameters_of(config) -> list[nn.Parameter]:
    return list(build_model(config).parameters())


def record(method: str, ranks: int, micro_batch: int = 2, accumulation: int = 1, config=None) -> rank.Recording:
    return rank.record(config or gpt2(), method, ranks, micro_batch, T, PLAIN, accumulation)


def rank_peak(config, method: str, ranks: int, micro_batch: int, seq: int, target=PLAIN, accumulation=1) -> RankPeak:
    recording = rank.record(config, method, ranks, micro_batch, seq, target, accumulation)
    return peak_of(recording, method, ranks, micro_batch)


def most_live(recording, names=None) -> int:
    live, now, most = {}, 0, 0
    for _, storage, size, name in recording.operations:
        if size == FREED:
            now -= live.pop(storage)
        else:
            live[storage] = size if names is None or name in names else 0
            now += live[storage]
        most = max(most, now)
    return most


def persistent_beside_parameters(tensors: int, micro_batch: int = 2) -> int:
    return 4 * tensors + 8 * micro_batch * T  # a step counter per tensor, and the token ids


def test_ddp_keeps_sixteen_bytes_per_parameter_and_while_it_accumulates_four_more():
    parameters = parameters_of(gpt2())
    N = sum(p.numel() for p in parameters)
    peak = rank_peak(gpt2(), "ddp", 4, 2, T, accumulation=2)
    assert peak.persistent_bytes == 16 * N + persistent_beside_parameters(len(parameters))
    # The buckets are made once; gradients that are not summed yet come on top.
    at_once = record("ddp", 4)
    assert most_live(at_once, {"gradient_buckets"}) == 4 * N
    more = most_live(record("ddp", 4, accumulation=2)) - most_live(at_once)
    assert 0.9 * 4 * N < more <= 4 * N


def test_ddp_on_one_rank_is_the_plain_run():
    config = gpt2()
    decoder = Decoder(build_model(config))
    recorder = Recorder()
    with rank._masks_as_on_tensors_with_data(), rank.FakeTensorMode(), recorder:
        model = decoder.model
        place(model)
        for index, block in enumerate(decoder.blocks):
            decoder.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros((2, T), dtype=torch.int64)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
    recording = record("ddp", 1)
    assert recorder.tape.peak_bytes() == most_live(recording)
    births = [size for _, size, _ in recorder.tape if size != FREED]
    assert births == [size for _, _, size, _ in recording.operations if size != FREED]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fsdp2_divides_parameters_gradients_and_states(ranks):
    parameters = parameters_of(gpt2())
    N = sum(p.numel() for p in parameters)
    padded = sum(-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) for p in parameters)
    peak = rank_peak(gpt2(), "fsdp2", ranks, 2, T)
    assert padded == N // ranks
    assert peak.persistent_bytes == 16 * padded + persistent_beside_parameters(len(parameters))


@pytest.mark.parametrize("method, ranks, divided", [("fsdp2", 8, 8), ("dp+tp", 8, 4)])
def test_a_model_that_is_sharded_never_lies_whole_on_the_gpu(method, ranks, divided):
    decoder = Decoder(build_model(gpt2()))
    if divided < ranks:
        keep_share(decoder, ranks // divided)
    share = sum(-(-p.shape[0] // divided) * (p.numel() // p.shape[0]) for p in decoder.model.parameters())
    assert most_live(record(method, ranks), {"parameters"}) == 4 * share


def test_fsdp2_holds_one_units_parameters_twice_while_they_are_gathered():
    decoder = Decoder(build_model(gpt2()))
    block = sum(p.numel() for p in decoder.blocks[0].parameters())
    rest = sum(p.numel() for p in decoder.model.parameters()) - 2 * block
    recording = record("fsdp2", 4)
    # The root stays whole from forward to backward; one block at a time is whole. A gathered buffer exists next to it:
    # in forward the block's own until the next one is waited for, in backward the prefetched block's.
    assert most_live(recording, {"unsharded_parameters"}) == 2 * rest + 2 * block
    # In forward there are two buffers for a moment, and the rank's own shard in 16 bit on its way into one.
    assert most_live(recording, {"gathered"}) == 2 * 2 * block + 2 * block // 4
    assert {stream for stream, *_ in recording.operations} == {0, 1, 2}
    assert {stream for stream, *_ in record("ddp", 4).operations} == {0}


@pytest.mark.quick(1)
@pytest.mark.parametrize("method, few, many", [("fsdp2", 2, 8), ("tp", 2, 4), ("dp+tp", 4, 8)])
def test_peaks_fall_as_ranks_grow(method, few, many):
    less, more = (rank_peak(gpt2(), method, ranks, 2, T) for ranks in (many, few))
    assert less.allocated_peak_bytes < more.allocated_peak_bytes
    assert less.reserved_peak_bytes <= more.reserved_peak_bytes  # pages of 2 and 20 MiB
    assert sum(less.at_peak.values()) == less.allocated_peak_bytes <= less.reserved_peak_bytes


@pytest.mark.parametrize("config, ranks", [(gpt2(), 4), (llama(), 2), (llama(tie_word_embeddings=True), 2)])
def test_tensor_parallel_shares_add_up_to_the_model(config, ranks):
    whole = {name: p.shape.numel() for name, p in build_model(config).named_parameters()}
    decoder = Decoder(build_model(config))
    keep_share(decoder, ranks)
    share = {name: p.numel() for name, p in decoder.model.named_parameters()}
    assert share.keys() == whole.keys()
    replicated = {name for name in whole if "ln_" in name or "norm" in name or "wpe" in name or "c_proj.bias" in name}
    assert {name for name in whole if share[name] == whole[name]} == replicated
    assert all(share[name] * ranks == whole[name] for name in whole if name not in replicated)
    peak = rank_peak(config, "tp", ranks, 2, T)
    buffers = sum(b.nbytes for b in decoder.model.buffers())
    kept = 16 * sum(share.values()) + persistent_beside_parameters(len(share)) + buffers
    assert peak.persistent_bytes == kept


def test_a_vocabulary_that_is_not_divided_evenly_is_padded():
    decoder = Decoder(build_model(llama()))
    decoder.model.config.vocab_size = 1000
    keep_share(decoder, 2)
    odd = Decoder(build_model(LlamaConfig(**{**llama().to_dict(), "vocab_size": 999})))
    keep_share(odd, 2)
    assert odd.head_weight.shape == decoder.head_weight.shape


def test_what_cannot_be_divided_is_refused_by_name():
    with pytest.raises(InputError, match="4 attention heads cannot be divided among 3 GPUs"):
        rank_peak(gpt2(), "tp", 3, 1, T)
    with pytest.raises(InputError, match="2 attention heads"):  # of keys and values
        rank_peak(llama(), "tp", 4, 1, T)
    opt = OPTConfig(hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    with pytest.raises(InputError, match="does not know blocks of"):
        rank_peak(opt, "tp", 2, 1, T)
    for method, ranks in (("dp+tp", 2), ("tp", 1), ("zero", 2)):
        with pytest.raises(InputError):
            rank_peak(gpt2(), method, ranks, 1, T)


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", METHODS)
def test_six_blocks_allocate_what_four_say_to_the_last_operation(method):
    accumulation = 2 if method == "fsdp2" else 1
    case = gpt2(n_layer=6, **DROPOUT), method, 4, 2, T, RTX3090, accumulation
    short = record_blocks(*case, BLOCKS)
    assert stretched(short.placed, 4) == short.operations
    assert stretched(short.placed, 6) == record_blocks(*case, 6).operations


@pytest.mark.exhaustive
def test_a_stretched_recording_has_the_peaks_and_the_seconds_of_a_whole_one(monkeypatch):
    config = gpt2(n_layer=6)
    whole = peak_of(record_blocks(config, "ddp", 4, 2, T, RTX3090, 2, 6), "ddp", 4, 2)
    recorded = blocks_recorded(monkeypatch)
    peak = rank_peak(config, "ddp", 4, 2, T, RTX3090, accumulation=2)
    assert recorded == [4, 5]
    assert peak.seconds == pytest.approx(whole.seconds, rel=1e-2)
    assert peak.micro_batch_seconds == pytest.approx(whole.micro_batch_seconds, rel=1e-2)
    assert 0.4 * peak.seconds < peak.micro_batch_seconds < 0.6 * peak.seconds  # of two
    seconds = {"seconds": whole.seconds, "micro_batch_seconds": whole.micro_batch_seconds}
    assert replace(peak, **seconds) == whole


def test_blocks_that_are_not_alike_are_all_recorded(monkeypatch):
    recorded = blocks_recorded(monkeypatch, rank.Recording([], 0.0, 0.0, []))
    neo = {"hidden_size": 64, "num_layers": 6, "num_heads": 4, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 1}
    record("ddp", 2, config=GPTNeoConfig(**neo, attention_types=[[["global", "local"], 3]]))
    assert recorded == [6]


def test_where_four_blocks_do_not_foretell_five_all_are_recorded(monkeypatch):
    something = rank.Recording([Operation(0, 0, 8, "")], 0.0, 0.0, [])
    recorded = blocks_recorded(monkeypatch, something)
    assert record("ddp", 2, config=gpt2(n_layer=6)) is something  # and not what `placed`, which is nothing, gives
    assert recorded == [4, 5, 6]


def blocks_recorded(monkeypatch, instead: rank.Recording | None = None) -> list[int]:
    """Returns how many blocks each recording from now on has run, or would have if it is replaced by another."""
    recorded, run = [], rank.record_blocks
    monkeypatch.setattr(rank, "record_blocks", lambda *case: recorded.append(case[-1]) or instead or run(*case))
    return recorded


def test_what_does_not_fall_into_phases_is_not_stretched():
    made = [Placed(Operation(0, block, 8, ""), 1 + block, block) for block in range(BLOCKS)]
    freed = [Placed(Operation(0, block, FREED, ""), 9, block) for block in range(BLOCKS)]
    assert len(stretched(made + freed, 6)) == 12
    assert stretched(made + freed[2:3], 6) is None  # a repeated block is not freed
    neighbours = Placed(Operation(0, 1, FREED, ""), 3, 2)  # each block frees the tensor of the one below, and ...
    far = Placed(Operation(0, 0, FREED, ""), 4, 3)  # ... the last one that of the block three below
    assert len(stretched([*made[:3], neighbours, made[3]], 6)) == 9
    assert stretched([*made[:3], neighbours, made[3], far], 6) is None


def test_on_a_card_with_flash_attention_nothing_is_as_large_as_all_pairs_of_tokens():
    config = gpt2(n_positions=1024, vocab_size=64, **DROPOUT)
    pairs = 2 * 4 * 1024 * 1024  # for two sequences and four heads: at least that many bytes

    def largest(method: str, target) -> int:
        recording = rank.record(config, method, 2, 2, 1024, target)
        return max(one.size for one in recording.operations if one.name in ("activations", "backward"))

    assert largest("ddp", RTX3090) < pairs and largest("fsdp2", RTX3090) < pairs
    assert largest("ddp", PLAIN) >= pairs


def test_dropout_saves_bools_on_a_card():
    sizes = [one.size for one in rank.record(gpt2(**DROPOUT), "ddp", 2, 3, T, RTX3090).operations]
    without = [one.size for one in rank.record(gpt2(), "ddp", 2, 3, T, RTX3090).operations]
    entries = 3 * T * 128
    # after the embeddings once, in each of two blocks twice, forward and again; two steps
    assert sizes.count(entries) - without.count(entries) == 2 * (1 + 2 * 2 * 2)


def test_functions_that_autocast_runs_in_fp32_on_cuda_alone_do_so():
    with torch.autocast("cpu", torch.bfloat16), rank._CudaAutocast():
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        assert nn.functional.layer_norm(x, (4,)).dtype is torch.float32
        mixed = [torch.ones(1, 1, 2, 4, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16)]
        assert nn.functional.scaled_dot_product_attention(*mixed).dtype is torch.bfloat16


def test_the_process_group_is_gone_afterwards_and_a_strange_one_is_left_alone():
    record("fsdp2", 2)
    assert not dist.is_initialized()
    with rank._fake_ranks(3, 1):
        with pytest.raises(LowmemError, match="another process"):
            record("ddp", 2)
        assert dist.get_world_size() == 3
    with pytest.raises(InputError):
        rank_peak(gpt2(n_inner=130), "tp", 4, 1, T)
    assert not dist.is_initialized()


@pytest.mark.exhaustive
def test_two_real_processes_peak_where_the_simulation_says():
    """PyTorch's own DistributedDataParallel and fully_shard train real tensors over gloo; the most that is alive in a
    steady step is what the simulation has, within a few scalars.

    Counted are the storages of operations that pass the dispatcher on the training thread, so this sees parameters,
    buckets, gradients, states, activations and FSDP2's buffers, and when each dies. It does not see what gloo's threads
    copy, DDP's second set of buckets, which replaces the first one in an earlier step, or anything of CUDA: streams,
    other kernels, NCCL. Both sides run the same model code on the CPU, FSDP2 also the same recipe.
    """
    run = runs.python(__file__)
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout.splitlines()[-1])
    for method in ("ddp", "fsdp2"):
        predicted = most_live(record(method, 2, accumulation=2))
        assert abs(predicted - measured[method]) <= EXACTLY_BUT_SCALARS, method


class _Counter(TorchDispatchMode):
    """Bytes of the storages that real operations make, `now` and at `most`."""

    now = most = 0

    def __enter__(self):
        self.sizes: dict[int, int] = {}
        resize = torch.UntypedStorage.resize_

        def watched(storage, size):
            resize(storage, size)
            self._count(storage._cdata, size)

        torch.UntypedStorage.resize_ = watched
        return super().__enter__()

    def __exit__(self, *exception):
        del torch.UntypedStorage.resize_
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self._count(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self._died, storage._cdata).atexit = False
        return result

    def _count(self, address: int, size: int) -> None:
        self.now += size - self.sizes.get(address, 0)
        self.sizes[address] = size
        self.most = max(self.most, self.now)

    def _died(self, address: int) -> None:
        self.now -= self.sizes.pop(address)


def _really_train(rank: int, port: int, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    measured = {}
    for method in ("ddp", "fsdp2"):
        decoder = Decoder(build_model(gpt2()))
        with _Counter() as counter:
            place(decoder.model)
            _zero(decoder.model)
            mesh = init_device_mesh("cpu", (2,))
            step = _ddp(decoder) if method == "ddp" else prepare(decoder, method, mesh, 2, T)[0]
            step(1)
            step(2)
            peaks = []
            for _ in range(2):
                counter.most = counter.now
                step(2)
                peaks.append(counter.most)
        measured[method] = min(peaks)  # gloo's thread drops its tensors a moment late, now and then
    dist.destroy_process_group()
    if rank == 0:
        queue.put(measured)


def _train_in_two_processes() -> None:
    """Forks, which takes a process in which autograd has not run yet: that is why this file is also a program."""
    build_model(gpt2())  # imports once for both
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked = multiprocessing.get_context("fork")
    queue = forked.SimpleQueue()
    processes = [forked.Process(target=_really_train, args=(rank, port, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a process failed")
    print(json.dumps(queue.get()))


@torch.no_grad()
def _zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def _ddp(decoder: Decoder):
    """Returns the recipe as PyTorch's documentation has it."""
    for index, block in enumerate(decoder.blocks):
        decoder.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False)
    model = DistributedDataParallel(decoder.model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.zeros((2, T), dtype=torch.int64)

    def step(accumulation: int) -> None:
        optimizer.zero_grad()
        for index in range(accumulation):
            with model.no_sync() if index < accumulation - 1 else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                del loss
        optimizer.step()

    return step


if __name__ == "__main__":
    _train_in_two_processes()
