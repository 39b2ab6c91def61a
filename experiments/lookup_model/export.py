"""Write a trained model as a transformers checkpoint, half precision, and prove it is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from experiments.lookup_model.llama import NORM_EPS, ROPE_BASE, LookupLlama
from experiments.lookup_model.model import LookupOPT, Shape, Visible
from impress.demo.lookup.tokenizer import N_TOKENS, START_ID

MAX_BYTES = 10_000_000


def common(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.n_words,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "max_position_embeddings": shape.max_positions,
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "bos_token_id": START_ID,
        "eos_token_id": START_ID,
        "tie_word_embeddings": True,
    }


def opt_config(shape: Shape) -> OPTConfig:
    return OPTConfig(
        **common(shape),
        ffn_dim=4 * shape.hidden,
        word_embed_proj_dim=shape.hidden,
        do_layer_norm_before=True,
        activation_function="relu",
        dropout=0.0,
        layerdrop=0.0,
    )


def llama_config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        **common(shape),
        num_key_value_heads=shape.n_kv_heads,
        intermediate_size=shape.gated_width,
        hidden_act="silu",
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
    )


def to_transformers(model: LookupOPT | LookupLlama) -> PreTrainedModel:
    """The transformers model with the weights of `model`, float32, in evaluation mode."""
    weights = {f"model.{name}": p.detach().clone() for name, p in model.state_dict().items()}
    if isinstance(model, LookupOPT):
        served = OPTForCausalLM(opt_config(model.shape))
        weights["lm_head.weight"] = weights["model.decoder.embed_tokens.weight"]
    else:
        served = LlamaForCausalLM(llama_config(model.shape))
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    served.load_state_dict(weights)
    return served.eval()


@torch.no_grad()
def largest_difference(model: LookupOPT | LookupLlama, served: PreTrainedModel) -> float:
    """Largest difference of the two models' logits on random words, positions from 0."""
    tokens = torch.randint(2, N_TOKENS, (2, 300), generator=torch.Generator().manual_seed(0))
    causal = torch.ones(300, 300, dtype=torch.bool).tril().expand(2, -1, -1)
    see = Visible(280, causal[:, 280:], causal[:, 280:, 0])
    ours = model.logits(model(tokens, torch.arange(300).expand(2, -1), see).final)
    theirs = served(tokens, attention_mask=torch.ones_like(tokens)).logits
    return float((ours - theirs).abs().max())


def export(model: LookupOPT | LookupLlama, folder: Path) -> None:
    """Write config.json and model.safetensors (float16) into `folder`.

    Raises AssertionError when transformers would not compute what was trained, or the file would
    exceed MAX_BYTES.
    """
    served = to_transformers(model)
    difference = largest_difference(model, served)
    assert difference < 1e-3, f"transformers differs by {difference}"
    served.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    size = (folder / "model.safetensors").stat().st_size
    assert size < MAX_BYTES, f"{size} bytes"
    print(f"{folder}: {size / 1e6:.2f} MB, logits within {difference:.1e} of the trained model")
