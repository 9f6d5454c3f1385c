"""A model in which some layer would not isolate documents is refused when it is built, never trained."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.attention import Attention

from wlb_megatron.config import WlbConfig
from wlb_megatron.plugin.model.spec import prepare_model, with_wlb_attention
from wlb_megatron.refusals import Refused


class Foreign(Attention):
    """An attention whose core knows no documents."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.core_attention = torch.nn.Identity()

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Megatron's Attention asks for this method; a refused model never runs it")


class Recurrent(MambaLayer):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [("mixer", Recurrent, "is a Recurrent"), ("attention", Foreign, "was built with Identity")],
    ids=["one that carries state over documents", "an attention that came in after the plugin's"],
)
def test_a_layer_that_would_not_isolate_documents_is_named(name, layer, words):
    model = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({name: layer()})})
    with pytest.raises(Refused, match=rf"0\.{name} {words}"):
        prepare_model([model], WlbConfig())


@pytest.mark.parametrize("ring", [False, True])
def test_the_host_waits_for_transfers_of_a_ring_exchange_alone(ring):
    model = torch.nn.Identity()
    model.config = SimpleNamespace(use_ring_exchange_p2p=ring, batch_p2p_sync=True)
    prepare_model([model], WlbConfig())
    assert model.config.batch_p2p_sync is ring


def test_a_layer_without_core_attention_is_refused():
    spec = SimpleNamespace(module="StateSpaceLayer", submodules=SimpleNamespace())
    with pytest.raises(Refused, match="no core_attention in the layer spec StateSpaceLayer"):
        with_wlb_attention(spec)
