"""Small random configurations of many architectures: the zoo.

Each entry of `ZOO` builds a model in evaluation mode and a data set of four samples. Widths are tiny. Weights are drawn
at random, larger than the usual initialization, so that no layer is close to linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo import plain_models as plain
from zoo.timm_models import import_timm

SAMPLES = 4
TOKENS = 6


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo.

    Attributes:
        name: Name in tests and tables.
        library: Package that the model comes from.
        build: Function that returns the model and its data.
        options: Further arguments of `featlearn.probe`.
        dtype: Precision of the model and of floating-point data.
        tolerance: Tolerance of comparisons. Larger if the model computes some parts in float32.
        covered: Smallest share of the weights that is measured.
        refused: Whether the samples of a batch act on each other, so that the model is refused.
        known: Reason why a check fails at present, by name of the check.
    """

    name: str
    library: str
    build: Callable[[], tuple[nn.Module, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    covered: float = 0.95
    refused: bool = False
    known: dict[str, str] = field(default_factory=dict)

    def make(self) -> tuple[nn.Module, Any]:
        """Build the model in float64 and evaluation mode, and its data, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, data = self.build()
            model = (model.double() if self.dtype == torch.float64 else model.float()).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        fan = parameter.numel() / len(parameter) if parameter.ndim > 1 else 16.0
                        noise = torch.randn(parameter.shape, dtype=torch.float64)
                        parameter += 0.4 * noise.to(parameter.dtype) / math.sqrt(fan)
        return model, cast(data, self.dtype)

    def __repr__(self) -> str:
        return f"Architecture({self.name})"


def cast(data: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors of a batch, a tensor or a dict, to a precision."""
    if isinstance(data, dict):
        return {key: cast(part, dtype) for key, part in data.items()}
    return data.to(dtype) if data.is_floating_point() else data


ZOO: dict[str, Architecture] = {}

# Known failures, see `Architecture.known`.
NO_BACKWARD = "reversible blocks run with autograd off, and refuse a backward pass in evaluation mode"
REVERSIBLE = {"coverage": NO_BACKWARD, "unused": NO_BACKWARD}


def entry(name: str, library: str, build: Callable[[], tuple[nn.Module, Any]], **options: Any) -> None:
    """Add an architecture to `ZOO`."""
    assert name not in ZOO, name
    ZOO[name] = Architecture(name, library, build, **options)


# --- data -------------------------------------------------------------------------------------------------------------


def numbers(*shape: int) -> Tensor:
    """Return Gaussian inputs of all samples."""
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


def ids(length: int = TOKENS, vocabulary: int = 30, low: int = 4) -> Tensor:
    """Return token ids of all samples, above the ids of special tokens."""
    return torch.randint(low, vocabulary, (SAMPLES, length))


def tokens(**more: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Return a function that draws a batch with ``input_ids`` and further parts."""
    return lambda: {"input_ids": ids(), **{key: part() for key, part in more.items()}}


def images(size: int = 16, channels: int = 3) -> Callable[[], dict[str, Tensor]]:
    """Return a function that draws a batch with ``pixel_values``."""
    return lambda: {"pixel_values": numbers(channels, size, size)}


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


def torch_entry(name: str, make: Callable[[], nn.Module], data: Callable[[], Any], **options: Any) -> None:
    """Add an architecture that is written in plain PyTorch."""
    entry(name, "torch", lambda: (make(), data()), **options)


torch_entry("MLP", plain.mlp, lambda: numbers(5))
torch_entry("LSTM", lambda: plain.Recurrent(nn.LSTM, num_layers=2), lambda: numbers(4, 5))
torch_entry("GRU", lambda: plain.Recurrent(nn.GRU), lambda: numbers(4, 5))
torch_entry(
    "LSTM, both ways, projected",
    lambda: plain.Recurrent(nn.LSTM, bidirectional=True, proj_size=3),
    lambda: numbers(4, 5),
)
torch_entry("nn.Transformer", plain.EncoderDecoder, lambda: numbers(5, 8))
torch_entry("U-Net", plain.UNet, lambda: numbers(2, 6, 6))
torch_entry("GCN", plain.GCN, lambda: numbers(6, 5))
torch_entry("GAT", plain.GAT, lambda: numbers(6, 5))
torch_entry("KAN", lambda: nn.Sequential(plain.KANLayer(4, 5), plain.KANLayer(5, 3)), lambda: numbers(4))
torch_entry("FNO", plain.FNO, lambda: numbers(8, 2))
torch_entry("Bilinear", plain.BilinearNet, lambda: numbers(5))
torch_entry("Hypernetwork", plain.HyperNetwork, lambda: numbers(5))
torch_entry("Einsum attention", plain.EinsumAttention, lambda: numbers(5, 6))
torch_entry("Sliced qkv attention", plain.SlicedAttention, lambda: numbers(5, 6))
for kind in ("loop", "gathered", "dense"):
    torch_entry(f"Experts, {kind}", lambda kind=kind: plain.Experts(kind), lambda: numbers(5, 6))
torch_entry("Conditional convolution", plain.ConditionalConv, lambda: numbers(2, 6, 6))
torch_entry("NF-ResNet", plain.NFResNet, lambda: numbers(2, 6, 6))
torch_entry("Weight norm", plain.weight_norm, lambda: numbers(5))
torch_entry("Spectral norm", plain.spectral_norm, lambda: numbers(2, 6, 6))
torch_entry("Siamese", plain.Siamese, lambda: numbers(2, 5))
torch_entry("MLP-Mixer", plain.Mixer, lambda: numbers(2, 6, 6))
torch_entry("Separable convolutions", plain.separable_convnet, lambda: numbers(2, 6, 6))
torch_entry("EmbeddingBag", plain.BagClassifier, lambda: ids(5, 20, 0))
torch_entry("Dict of outputs", plain.NamedOutputs, lambda: numbers(5))


# --- peft -------------------------------------------------------------------------------------------------------------


def adapted(**options: Any) -> tuple[nn.Module, Tensor]:
    """Return an MLP whose hidden layer has a low-rank adapter."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["2"], init_lora_weights=False, **options)
    return get_peft_model(plain.mlp(), config), numbers(5)


entry("LoRA", "peft", adapted)
entry("DoRA", "peft", lambda: adapted(use_dora=True))


# --- transformers -----------------------------------------------------------------------------------------------------


def hf(name: str, model: str, config: str, data: Callable[[], Any], settings: dict[str, Any], **options: Any) -> None:
    """Add a model of transformers, built from a configuration.

    Args:
        name: Name of the architecture.
        model: Class of the model.
        config: Class of its configuration.
        data: Function that draws the batch.
        settings: Arguments of the configuration.
        **options: Further attributes of the `Architecture`.
    """

    def build() -> tuple[nn.Module, Any]:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings)), data()

    entry(name, "transformers", build, **options)


# Some parts are computed in float32 by the model itself.
MIXED = {"tolerance": 1e-6}
SINGLE = {"dtype": torch.float32, "tolerance": 2e-4}

BERT = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 20,
    "num_labels": 3,
}
DECODER = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
VISION = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "num_labels": 3,
}

# Encoders of text.
hf("BERT", "BertForSequenceClassification", "BertConfig", tokens(), BERT)
hf("RoBERTa", "RobertaForMaskedLM", "RobertaConfig", tokens(), BERT)
hf(
    "DistilBERT",
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    tokens(),
    {"vocab_size": 30, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "num_labels": 3},
)
hf("ALBERT", "AlbertForSequenceClassification", "AlbertConfig", tokens(), BERT | {"embedding_size": 6})
hf("ELECTRA", "ElectraForPreTraining", "ElectraConfig", tokens(), BERT | {"embedding_size": 6})
hf(
    "DeBERTa-v2",
    "DebertaV2ForSequenceClassification",
    "DebertaV2Config",
    tokens(),
    BERT
    | {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "share_att_key": False,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
)
hf(
    "XLNet",
    "XLNetForSequenceClassification",
    "XLNetConfig",
    tokens(),
    {"vocab_size": 30, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12, "num_labels": 3},
)
hf(
    "LayoutLM",
    "LayoutLMForSequenceClassification",
    "LayoutLMConfig",
    tokens(),
    BERT | {"max_2d_position_embeddings": 16},
)
hf("DPR", "DPRQuestionEncoder", "DPRConfig", tokens(), BERT | {"projection_dim": 5})
hf("FNet", "FNetForSequenceClassification", "FNetConfig", tokens(), BERT | {"type_vocab_size": 4})
hf(
    "MobileBERT",
    "MobileBertForSequenceClassification",
    "MobileBertConfig",
    tokens(),
    BERT | {"embedding_size": 6, "intra_bottleneck_size": 6, "true_hidden_size": 6},
)
hf("SqueezeBERT", "SqueezeBertForSequenceClassification", "SqueezeBertConfig", tokens(), BERT | {"embedding_size": 8})
hf(
    "Funnel",
    "FunnelForSequenceClassification",
    "FunnelConfig",
    tokens(),
    {
        "vocab_size": 30,
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
        "d_model": 8,
        "n_head": 2,
        "d_head": 4,
        "d_inner": 12,
        "num_labels": 3,
    },
)
hf("BigBird", "BigBirdForSequenceClassification", "BigBirdConfig", tokens(), BERT | {"attention_type": "original_full"})
hf(
    "BigBird, sparse",
    "BigBirdForSequenceClassification",
    "BigBirdConfig",
    lambda: {"input_ids": ids(24)},
    BERT | {"block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 40},
)
hf(
    "Longformer",
    "LongformerForSequenceClassification",
    "LongformerConfig",
    tokens(),
    BERT | {"attention_window": [4, 4]},
)
REFORMER = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "attention_head_size": 4,
    "feed_forward_size": 12,
    "axial_pos_shape": [2, 4],
    "axial_pos_embds_dim": [4, 4],
    "max_position_embeddings": 8,
    "local_attn_chunk_length": 4,
    "num_labels": 3,
    "is_decoder": False,
}
hf(
    "Reformer",
    "ReformerForSequenceClassification",
    "ReformerConfig",
    lambda: {"input_ids": ids(8)},
    REFORMER | {"attn_layers": ["local", "local"]},
    known=REVERSIBLE,
)
hf("ModernBERT", "ModernBertForSequenceClassification", "ModernBertConfig", tokens(), BERT | {"pad_token_id": 0})

# Encoders and decoders of text.
hf(
    "T5",
    "T5ForConditionalGeneration",
    "T5Config",
    tokens(decoder_input_ids=lambda: ids(4)),
    {
        "vocab_size": 30,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
)
hf(
    "BART",
    "BartForConditionalGeneration",
    "BartConfig",
    tokens(decoder_input_ids=lambda: ids(4)),
    {
        "vocab_size": 30,
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 12,
        "decoder_ffn_dim": 12,
        "max_position_embeddings": 20,
    },
)

# Decoders of text.
GPT2 = {"vocab_size": 30, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 20}
hf("GPT-2", "GPT2LMHeadModel", "GPT2Config", tokens(), GPT2)
hf(
    "GPT-Neo",
    "GPTNeoForCausalLM",
    "GPTNeoConfig",
    tokens(),
    {
        "vocab_size": 30,
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 20,
        "intermediate_size": 12,
    },
)
hf("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", tokens(), BERT)
hf(
    "OPT",
    "OPTForCausalLM",
    "OPTConfig",
    tokens(),
    {
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 12,
        "max_position_embeddings": 20,
        "word_embed_proj_dim": 6,
    },
)
hf(
    "Bloom",
    "BloomForCausalLM",
    "BloomConfig",
    tokens(),
    {"vocab_size": 30, "hidden_size": 8, "n_layer": 2, "n_head": 2},
)
hf("Llama", "LlamaForCausalLM", "LlamaConfig", tokens(), DECODER)
hf("Mistral", "MistralForCausalLM", "MistralConfig", tokens(), DECODER | {"sliding_window": 4})
hf("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", tokens(), DECODER)
hf("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", tokens(), DECODER | {"head_dim": 4})
hf("Gemma", "GemmaForCausalLM", "GemmaConfig", tokens(), DECODER | {"head_dim": 4})
hf("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", tokens(), DECODER | {"head_dim": 4})
hf("Phi", "PhiForCausalLM", "PhiConfig", tokens(), DECODER)
hf("Falcon", "FalconForCausalLM", "FalconConfig", tokens(), DECODER)
hf(
    "Mixtral",
    "MixtralForCausalLM",
    "MixtralConfig",
    tokens(),
    DECODER | EXPERTS | {"num_local_experts": 3},
)
for kind in ("grouped_mm", "batched_mm"):
    hf(
        f"Mixtral, {kind}",
        "MixtralForCausalLM",
        "MixtralConfig",
        tokens(),
        DECODER | EXPERTS | {"num_local_experts": 3, "experts_implementation": kind},
        **SINGLE,
    )
hf(
    "GPT-OSS",
    "GptOssForCausalLM",
    "GptOssConfig",
    tokens(),
    DECODER | EXPERTS | {"head_dim": 4, "num_local_experts": 3, "sliding_window": 4},
)
hf(
    "Qwen2-MoE",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeConfig",
    tokens(),
    DECODER | EXPERTS | {"num_experts": 3, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6},
)
hf("OLMoE", "OlmoeForCausalLM", "OlmoeConfig", tokens(), DECODER | EXPERTS | {"num_experts": 3})
hf(
    "DeepSeek-V3",
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    tokens(),
    DECODER
    | EXPERTS
    | {
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 4,
        "q_lora_rank": 5,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
    **MIXED,
)
hf(
    "Mamba",
    "MambaForCausalLM",
    "MambaConfig",
    tokens(),
    {"vocab_size": 30, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2},
    **MIXED,
)
hf(
    "Mamba-2",
    "Mamba2ForCausalLM",
    "Mamba2Config",
    tokens(),
    {
        "vocab_size": 30,
        "hidden_size": 8,
        "state_size": 4,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 4,
        "n_groups": 2,
        "chunk_size": 4,
    },
    **MIXED,
)
hf(
    "RWKV",
    "RwkvForCausalLM",
    "RwkvConfig",
    tokens(),
    {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "context_length": 20, "use_cache": False},
)
hf(
    "Jamba",
    "JambaForCausalLM",
    "JambaConfig",
    tokens(),
    DECODER
    | EXPERTS
    | {
        "num_experts": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 2,
        "use_mamba_kernels": False,
    },
)

# Vision.
hf("ViT", "ViTForImageClassification", "ViTConfig", images(), VISION)
hf("DeiT", "DeiTForImageClassificationWithTeacher", "DeiTConfig", images(), VISION)
hf(
    "BEiT",
    "BeitForImageClassification",
    "BeitConfig",
    images(),
    VISION | {"use_relative_position_bias": True, "use_mean_pooling": True},
)
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 4,
    "depths": [2, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    "num_labels": 3,
}
hf("Swin", "SwinForImageClassification", "SwinConfig", images(), SWIN)
hf("Swin V2", "Swinv2ForImageClassification", "Swinv2Config", images(), SWIN)
CONVNEXT = {"num_channels": 3, "hidden_sizes": [4, 6], "depths": [1, 1], "num_stages": 2, "num_labels": 3}
hf("ConvNeXt", "ConvNextForImageClassification", "ConvNextConfig", images(), CONVNEXT)
hf("ConvNeXt V2", "ConvNextV2ForImageClassification", "ConvNextV2Config", images(), CONVNEXT)
hf(
    "ResNet",
    "ResNetForImageClassification",
    "ResNetConfig",
    images(),
    {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "num_labels": 3},
)
hf(
    "RegNet",
    "RegNetForImageClassification",
    "RegNetConfig",
    images(),
    {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "groups_width": 2, "num_labels": 3},
)
hf(
    "SegFormer",
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    images(),
    {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [4, 8],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 6,
        "num_labels": 3,
    },
)
hf(
    "LeViT",
    "LevitForImageClassification",
    "LevitConfig",
    images(32),
    {
        "image_size": 32,
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [1, 1, 1],
        "depths": [1, 1, 1],
        "key_dim": [4, 4, 4],
        "attention_ratio": [2, 2, 2],
        "mlp_ratio": [2, 2, 2],
        "num_labels": 3,
    },
)
hf(
    "MobileViT",
    "MobileViTForImageClassification",
    "MobileViTConfig",
    images(32),
    {
        "image_size": 32,
        "hidden_sizes": [4, 6, 8],
        "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 6],
        "num_attention_heads": 2,
        "expand_ratio": 2.0,
        "output_stride": 8,
        "num_labels": 3,
    },
)
hf(
    "PoolFormer",
    "PoolFormerForImageClassification",
    "PoolFormerConfig",
    images(),
    {
        "depths": [1, 1],
        "hidden_sizes": [4, 6],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "num_encoder_blocks": 2,
        "mlp_ratio": 2.0,
        "num_labels": 3,
    },
)
hf(
    "CvT",
    "CvtForImageClassification",
    "CvtConfig",
    images(32),
    {
        "embed_dim": [4, 8, 8],
        "num_heads": [1, 2, 2],
        "depth": [1, 2, 3],
        "mlp_ratio": [2.0, 2.0, 2.0],
        "drop_path_rate": [0.0, 0.0, 0.0],
        "num_labels": 3,
    },
)
hf("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", images(), VISION | {"mlp_ratio": 2})
hf(
    "ViT-MAE",
    "ViTMAEForPreTraining",
    "ViTMAEConfig",
    lambda: {"pixel_values": numbers(3, 16, 16), "noise": torch.rand(SAMPLES, 4, dtype=torch.float64)},
    VISION
    | {
        "mask_ratio": 0.5,
        "decoder_hidden_size": 8,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 12,
    },
)


def detr() -> tuple[nn.Module, Any]:
    """Return DETR with a small ResNet."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], out_features=["stage2"])
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        num_queries=3,
        num_labels=3,
    )
    return DetrForObjectDetection(config), {"pixel_values": numbers(3, 16, 16)}


entry("DETR", "transformers", detr)

# Several inputs.
TOWER = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT_TOWER = TOWER | {
    "vocab_size": 30,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE_TOWER = TOWER | {"image_size": 16, "patch_size": 8}


def paired() -> dict[str, Tensor]:
    """Return a batch of texts and images."""
    return {"input_ids": ids(), "pixel_values": numbers(3, 16, 16)}


def embeddings(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the embeddings of text and image: the logits compare each text with the images of all samples."""
    result = model(**batch)
    return torch.cat([result.image_embeds, result.text_embeds], -1)


TOWERS = {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER}
hf("CLIP", "CLIPModel", "CLIPConfig", paired, TOWERS | {"projection_dim": 6}, options={"forward": embeddings})
hf("SigLIP", "SiglipModel", "SiglipConfig", paired, TOWERS, options={"forward": embeddings})
hf(
    "Perceiver",
    "PerceiverForSequenceClassification",
    "PerceiverConfig",
    lambda: {"inputs": ids()},
    {
        "num_latents": 3,
        "d_latents": 8,
        "d_model": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "vocab_size": 30,
        "max_position_embeddings": 20,
        "num_labels": 3,
    },
)

# Sound.
WAVES = {
    "vocab_size": 12,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "conv_dim": [4, 4],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}
hf("Wav2Vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", lambda: {"input_values": numbers(120)}, WAVES)
hf("HuBERT", "HubertForCTC", "HubertConfig", lambda: {"input_values": numbers(120)}, WAVES)
hf(
    "Whisper",
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    lambda: {"input_features": numbers(5, 16), "decoder_input_ids": ids(4)},
    {
        "vocab_size": 30,
        "num_mel_bins": 5,
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 12,
        "decoder_ffn_dim": 12,
        "max_source_positions": 8,
        "max_target_positions": 12,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
)
hf(
    "AST",
    "ASTForAudioClassification",
    "ASTConfig",
    lambda: {"input_values": numbers(16, 8)},
    {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "patch_size": 4,
        "frequency_stride": 4,
        "time_stride": 4,
        "max_length": 16,
        "num_mel_bins": 8,
        "num_labels": 3,
    },
)

# Time series.
hf(
    "PatchTST",
    "PatchTSTForPrediction",
    "PatchTSTConfig",
    lambda: {"past_values": numbers(16, 2)},
    {
        "num_input_channels": 2,
        "context_length": 16,
        "patch_length": 4,
        "patch_stride": 4,
        "num_hidden_layers": 2,
        "d_model": 8,
        "num_attention_heads": 2,
        "ffn_dim": 12,
        "prediction_length": 3,
        "loss": "mse",
    },
)
SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
}


def series() -> dict[str, Tensor]:
    """Return a batch of time series with their past and future."""
    return {
        "past_values": numbers(10),
        "past_time_features": numbers(10, 1),
        "past_observed_mask": torch.ones(SAMPLES, 10, dtype=torch.float64),
        "future_values": numbers(4),
        "future_time_features": numbers(4, 1),
    }


hf("Time series transformer", "TimeSeriesTransformerModel", "TimeSeriesTransformerConfig", series, SERIES)
hf("Informer", "InformerModel", "InformerConfig", series, SERIES)
# Refused: in evaluation mode, the attention of a sample is shifted by the delays of other samples.
AUTOFORMER = SERIES | {"moving_average": 3, "label_length": 4}
hf("Autoformer", "AutoformerModel", "AutoformerConfig", series, AUTOFORMER, refused=True, **SINGLE)


# --- timm -------------------------------------------------------------------------------------------------------------


def timm_entry(name: str, model: str, size: int, settings: dict[str, Any], **options: Any) -> None:
    """Add a model of timm.

    Args:
        name: Name of the architecture.
        model: Class of the model.
        size: Height and width of the images.
        settings: Arguments of the class.
        **options: Further attributes of the `Architecture`.
    """

    def build() -> tuple[nn.Module, Tensor]:
        return getattr(import_timm().models, model)(num_classes=3, **settings), numbers(3, size, size)

    entry(name, "timm", build, **options)


PATCHES = {"img_size": 16, "patch_size": 8, "embed_dim": 8}
timm_entry("CaiT", "Cait", 16, PATCHES | {"depth": 2, "num_heads": 2, "depth_token_only": 1})
timm_entry("XCiT", "Xcit", 16, PATCHES | {"depth": 1, "num_heads": 2, "cls_attn_layers": 1})
timm_entry("TNT", "TNT", 16, PATCHES | {"inner_dim": 4, "depth": 1, "num_heads_inner": 2, "num_heads_outer": 2})
timm_entry("EVA", "Eva", 16, PATCHES | {"depth": 2, "num_heads": 2, "use_rot_pos_emb": True})
timm_entry(
    "CrossViT",
    "CrossVit",
    32,
    {
        "img_size": 32,
        "img_scale": (1.0, 1.0),
        "patch_size": (8, 16),
        "embed_dim": (8, 8),
        "depth": ((1, 1, 0),),
        "num_heads": (2, 2),
        "mlp_ratio": (2.0, 2.0, 1.0),
    },
)
timm_entry(
    "VOLO",
    "VOLO",
    32,
    {
        "img_size": 32,
        "layers": (1, 1, 1, 1),
        "embed_dims": (8, 8, 8, 8),
        "num_heads": (2, 2, 2, 2),
        "mlp_ratio": (2, 2, 2, 2),
        "stem_hidden_dim": 8,
    },
)
timm_entry("MetaFormer", "MetaFormer", 32, {"depths": (1, 1), "dims": (4, 8)})
timm_entry("ConvMixer", "ConvMixer", 16, {"dim": 6, "depth": 2, "kernel_size": 3, "patch_size": 4})
timm_entry("DenseNet", "DenseNet", 32, {"growth_rate": 4, "block_config": (1, 1)})
