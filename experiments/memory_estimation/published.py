"""Others' figures of the same models, and their cases in our simulation.

They are from LLMem (Kim et al., IJCAI 2024, arXiv:2404.10933), DNNMem (Gao et al., ESEC/FSE 2020,
doi:10.1145/3368089.3417050), and `accelerate estimate-memory`.
"""

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from experiments.harness.models import MODELS
from experiments.memory_estimation.estimate import figures_of, plain_target
from experiments.memory_estimation.plain import LOGITS_IN_FP32, record_plain
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import Card, Rate
from lowmem.cudasim.tape import Tape, under_cap
from lowmem.models.build import build_model
from lowmem.units import MIB

SEQ = 512
LLMEM_SOURCE = "LLMem, arXiv:2404.10933, Table 2 (V100-16GB, 512 tokens)"
# DNNMem's own tables could not be read. Which error belongs to which model was not found.
DNNMEM_ERRORS = (0.343, 0.571)  # smallest and largest of the four cases, in LLMem's Table 2, by LLMEM's source
BASE_MIB = 500  # the CUDA context of a V100 under torch 2.0 and CUDA 11.7, LLMem's m_base; assumed
_HALF, _FULL = 2, 4
V100 = Card(
    "v100", 16384 * MIB, (7, 0), 80, {"fp32": Rate(14e12, 0.8)}, 900e9, 12e9, ("Tesla V100-PCIE-16GB",),
    "NVIDIA V100 data sheet; here for its capability alone",
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    predicted_mib: int
    measured_mib: int
    source: str = LLMEM_SOURCE

    @property
    def error(self) -> float:
        return self.predicted_mib / self.measured_mib - 1


# In MiB. Measured is nvidia-smi's used memory: CUDA's context and all that the allocator holds. The pairs came
# second-hand (github.com/wanadzhar913/llmem-gpu-vram-calculator, paper-notes/llmem), without the paper. The recipe was
# read in github.com/taehokim20/LLMem (dp_real.py, size_estimator.py). Batch sizes were not found: see llmem_batch.
LLMEM = {
    "opt-125m": Published(16314, 16378),
    "opt-350m": Published(16004, 16264),
    "bloom-560m": Published(16578, 16324),
    "codegen-350M-mono": Published(16236, 16100),  # theirs is codegen-350M-nl: the same shape
}


def llmem_batch(name: str) -> float:
    """Returns the batch at which LLMem's formula (its section 4.2) gives its published figure: whole except for
    rounding and the error of BASE_MIB."""
    config = MODELS[name].config()
    model = build_model(config)
    head = model.get_output_embeddings().weight
    tied = head is model.get_input_embeddings().weight
    total = sum(parameter.numel() for parameter in model.parameters())
    counted = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding))
    counted -= head.numel() if tied else 0  # Embedding and Linear alone, the tied matrix once
    weights_and_masters = (total - (0 if tied else head.numel())) * (_HALF + _FULL)
    moments = counted * 2 * _FULL
    vocabulary, hidden = head.shape[0], config.hidden_size
    per_logit = _FULL if config.model_type in LOGITS_IN_FP32 else _HALF
    embeddings = sum(isinstance(module, nn.Embedding) for module in model.modules())
    outputs = (embeddings + config.num_hidden_layers) * SEQ * hidden * _HALF
    logits = (SEQ + 2 * (SEQ - 1)) * vocabulary * per_logit
    fixed = weights_and_masters + moments + head.numel() * _HALF + BASE_MIB * MIB
    return (LLMEM[name].predicted_mib * MIB - fixed) / (outputs + logits)


def llmem_row(name: str) -> dict:
    """Simulates LLMem's case: its recipe on its card. `error`: of the allocated bytes plus BASE_MIB at the derived
    batch, against the measurement. `largest_batch`: under the card's cap. `used_mib`: nvidia-smi's figure then."""
    derived = llmem_batch(name)
    batch = max(1, round(derived))
    memory = under_cap(_llmem_tape(name, batch), expandable_segments=False)
    capped, fitting = None, batch
    while capped is None and fitting:
        try:
            tape = _llmem_tape(name, fitting)
            capped = under_cap(tape, V100.memory_bytes - BASE_MIB * MIB, expandable_segments=False)
        except SimulatedOutOfMemory:
            fitting -= 1
    published = LLMEM[name]
    return figures_of(memory) | {
        "batch": batch,
        "batch_derived": round(derived, 2),
        "base_mib": BASE_MIB,
        "allocated_and_base_mib": round(memory.allocated_peak_bytes / MIB) + BASE_MIB,
        "error": (memory.allocated_peak_bytes / MIB + BASE_MIB) / published.measured_mib - 1,
        "largest_batch": fitting,
        "used_mib": None if capped is None else round(capped.reserved_peak_bytes / MIB) + BASE_MIB,
        "published_predicted_mib": published.predicted_mib,
        "published_measured_mib": published.measured_mib,
        "published_error": published.error,
        "dnnmem_errors": DNNMEM_ERRORS,
        "source": published.source,
    }


def _llmem_tape(name: str, batch: int) -> Tape:
    config = MODELS[name].config()
    config._attn_implementation = "eager"  # transformers 4.29 has no other
    return record_plain(config, SEQ, batch, "llmem", plain_target(V100))


def accelerate_answer(config: PretrainedConfig) -> dict | None:
    """Returns the answer of `accelerate estimate-memory` in bytes, or None without accelerate. "Training using Adam" is
    4 times the weights in fp32."""
    try:
        from accelerate import __version__
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return None
    # These are the functions of the command, which itself needs the hub.
    total, largest = calculate_maximum_sizes(build_model(config).to("meta"))
    answer = {"version": __version__}
    for dtype, divisor in (("float32", 1), ("float16", 2)):
        answer[dtype] = {
            "largest_layer": largest[0] // divisor,
            "total_size": total // divisor,
            "training_with_adam": max(estimate_training_usage(total, dtype).values()),
        }
    return answer
