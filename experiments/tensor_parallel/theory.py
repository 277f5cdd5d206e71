"""Computes from a decoder's config alone what each of N ranks holds, keeps and sends.

Sent: Megatron-LM (Shoeybi et al. 2019, section 3). Kept for backward: Korthikanti et al. 2022, section 4, without
dropout and with attention that keeps no scores. All numbers here have 4 bytes or 8.
"""

from transformers import PretrainedConfig

GELU_KEEPS = 3  # more tensors of the MLP's inner width: transformers' gelu_new is made of several operations


def parameters(config: PretrainedConfig, ranks: int) -> float:
    """Returns the parameters of a rank if all that is cut is cut evenly."""
    hidden, rows = config.hidden_size, -(-config.vocab_size // ranks)
    return cut_of_a_block(config) * config.num_hidden_layers / ranks + tables(config) * rows * hidden + whole(config)


def whole(config: PretrainedConfig) -> int:
    """Returns how many parameters every rank has: norms; of GPT-2 positions, and the biases of row-parallel layers."""
    return config.num_hidden_layers * whole_of_a_block(config) + sum(whole_at_ends(config))


def whole_of_a_block(config: PretrainedConfig) -> int:
    return config.hidden_size * (2 if config.model_type == "llama" else 4 + 2)


def whole_at_ends(config: PretrainedConfig) -> tuple[int, int]:
    """Returns numbers of whole parameters before the blocks, and after them."""
    hidden = config.hidden_size
    return (0, hidden) if config.model_type == "llama" else (config.n_positions * hidden, 2 * hidden)


def cut_of_a_block(config: PretrainedConfig) -> int:
    hidden, inner = config.hidden_size, _inner(config)
    if config.model_type == "llama":
        query, key = _widths(config)
        return 2 * hidden * (query + key) + 3 * hidden * inner
    return 4 * hidden**2 + 3 * hidden + 2 * hidden * inner + inner


def tables(config: PretrainedConfig) -> int:
    """Returns the number of matrices as large as the vocabulary."""
    return 1 if config.tie_word_embeddings else 2


def _inner(config: PretrainedConfig) -> int:
    return config.intermediate_size if config.model_type == "llama" else config.n_inner or 4 * config.n_embd


def _widths(config: PretrainedConfig) -> tuple[int, int]:
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    return head * config.num_attention_heads, head * config.num_key_value_heads


def kept_bytes(config: PretrainedConfig, ranks: int, tokens: int, number_bytes: int, sequence_parallel: bool) -> float:
    """Returns the bytes that a rank's forward keeps for backward. `tokens`: of a step."""
    # A norm keeps its input and its output, Llama's norm a product, too; the loss a probability for each word. Norms'
    # tensors are whole on every rank, all else is divided.
    hidden, norms, words = config.hidden_size, 2 * config.num_hidden_layers + 1, -(-config.vocab_size // ranks)
    if config.model_type == "llama":
        query, key = _widths(config)
        of_norm, inside = 3, 2 * query + 2 * key + 4 * _inner(config)
    else:
        of_norm, inside = 2, 4 * hidden + (2 + GELU_KEEPS) * _inner(config)
    # With sequence parallelism the norms' outputs are gathered and kept; Korthikanti et al., 4.2.2, gather them again.
    gathered = 1 if sequence_parallel else of_norm
    at_norms = norms * hidden * (gathered + (of_norm - gathered) / ranks)
    return tokens * number_bytes * (at_norms + config.num_hidden_layers * inside / ranks + words)


def sent_bytes(config: PretrainedConfig, ranks: int, tokens: int, number_bytes: int, sequence_parallel: bool) -> float:
    """Returns the bytes that a rank sends per step in a ring."""
    # Two all-reduces in each pass of a block, one more for the embedding and one for the head's input. All-gather and
    # reduce-scatter (sequence parallelism) together send the same; there, gradients of whole weights are added up, too.
    rounds = 4 * config.num_hidden_layers + 2
    numbers = rounds * 2 * tokens * config.hidden_size + (2 * whole(config) if sequence_parallel else 0)
    return numbers * number_bytes * (ranks - 1) / ranks
