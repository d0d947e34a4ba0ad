"""The networks of the zoo: 20 of torchvision and 20 architectures of transformers.

Nothing is fetched: weights are random. Networks of torchvision that come in one size are
those; others, and all of transformers, are built as small as they go.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from hpcfed.models.own import Sample

CLASSES = 10
LENGTH = 16
"""Tokens of a text."""
VOCABULARY = 90
"""Tokens that the data has; the networks know some more."""
KNOWN = 96
IMAGES = Sample((3, 32, 32), (CLASSES,))
LARGER = Sample((3, 64, 64), (CLASSES,))
TEXTS = Sample((LENGTH,), (CLASSES,), vocabulary=VOCABULARY)
NEXT = Sample((LENGTH,), (LENGTH, VOCABULARY), vocabulary=VOCABULARY)


@dataclass(frozen=True)
class Animal:
    """A network and the data that it is for."""

    name: str
    library: str
    sample: Sample
    build: Callable[[], nn.Module]


def _torchvision(name: str, sample: Sample = IMAGES, **options: Any) -> Animal:
    """Return a network by the name of its function."""

    def build() -> nn.Module:
        import torchvision

        function = getattr(torchvision.models, name)
        network: nn.Module = function(num_classes=CLASSES, **options)
        return network

    return Animal(name, "torchvision", sample, build)


def _convnext() -> nn.Module:
    from torchvision.models import convnext

    setting = [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)]
    return convnext.ConvNeXt(setting, stochastic_depth_prob=0.1, num_classes=CLASSES)


def _vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        dropout=0.1,
        num_classes=CLASSES,
    )


def _swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    second: dict[str, Any] = {
        "block": swin.SwinTransformerBlockV2,
        "downsample_layer": swin.PatchMergingV2,
    }
    return swin.SwinTransformer(
        patch_size=[2, 2],
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=CLASSES,
        **(second if version == 2 else {}),
    )


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit(
        input_size=(32, 32),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.1,
        num_classes=CLASSES,
    )


TORCHVISION = (
    _torchvision("resnet18"),
    _torchvision("resnet50"),
    _torchvision("resnext50_32x4d"),
    _torchvision("densenet121"),
    _torchvision("googlenet", LARGER, aux_logits=False, init_weights=False),
    _torchvision("squeezenet1_1"),
    _torchvision("mobilenet_v2"),
    _torchvision("mobilenet_v3_small"),
    _torchvision("mobilenet_v3_large"),
    _torchvision("mnasnet0_5"),
    _torchvision("shufflenet_v2_x0_5"),
    _torchvision("shufflenet_v2_x1_0"),
    _torchvision("efficientnet_b0"),
    _torchvision("regnet_x_400mf"),
    _torchvision("regnet_y_400mf"),
    Animal("convnext", "torchvision", IMAGES, _convnext),
    Animal("vision_transformer", "torchvision", IMAGES, _vision_transformer),
    Animal("swin", "torchvision", IMAGES, partial(_swin, 1)),
    Animal("swin_v2", "torchvision", IMAGES, partial(_swin, 2)),
    Animal("maxvit", "torchvision", IMAGES, _maxvit),
)

SMALL = {
    "vocab_size": KNOWN,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What most architectures call their sizes."""
OF_IMAGES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def _transformers(kind: str, sample: Sample, sizes: dict[str, Any]) -> Animal:
    """Return a network by its architecture's name, with a head for the data."""

    def build() -> nn.Module:
        import transformers

        maker: Any = transformers.AutoModelForImageClassification
        if len(sample.outputs) == 2:
            maker = transformers.AutoModelForCausalLM
        elif sample.vocabulary:
            maker = transformers.AutoModelForSequenceClassification
        options = dict(sizes)
        if maker is not transformers.AutoModelForCausalLM:
            options["num_labels"] = CLASSES
        config = transformers.AutoConfig.for_model(kind, **options)
        # A training step never reads what generation would cache.
        config.use_cache = False
        network: nn.Module = maker.from_config(config)
        return network

    return Animal(kind, "transformers", sample, build)


def _sizes(**others: Any) -> dict[str, Any]:
    return SMALL | others


TRANSFORMERS = (
    _transformers("bert", TEXTS, SMALL),
    _transformers(
        "distilbert", TEXTS, _sizes(dim=32, hidden_dim=64, n_layers=2, n_heads=2)
    ),
    _transformers("electra", TEXTS, _sizes(embedding_size=32)),
    _transformers("roberta", TEXTS, SMALL),
    _transformers("albert", TEXTS, _sizes(embedding_size=16)),
    _transformers("deberta-v2", TEXTS, SMALL),
    _transformers("gpt2", NEXT, _sizes(n_embd=32, n_layer=2, n_head=2, n_positions=64)),
    _transformers("gpt_neox", NEXT, SMALL),
    _transformers("llama", NEXT, SMALL),
    _transformers("qwen2", NEXT, _sizes(num_key_value_heads=1)),
    _transformers("qwen3", NEXT, _sizes(num_key_value_heads=1, head_dim=16)),
    _transformers("mistral", NEXT, _sizes(num_key_value_heads=1)),
    _transformers("gemma2", NEXT, _sizes(num_key_value_heads=1, head_dim=16)),
    _transformers("phi", NEXT, SMALL),
    _transformers("opt", NEXT, _sizes(ffn_dim=64, word_embed_proj_dim=32)),
    _transformers("bloom", NEXT, _sizes(n_layer=2, n_head=2)),
    _transformers("mamba", NEXT, _sizes(state_size=4)),
    _transformers(
        "mixtral",
        NEXT,
        _sizes(num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1),
    ),
    _transformers("vit", IMAGES, OF_IMAGES),
    _transformers(
        "convnext", IMAGES, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
    ),
)

ZOO = {
    f"{animal.library}:{animal.name}": animal for animal in TORCHVISION + TRANSFORMERS
}
