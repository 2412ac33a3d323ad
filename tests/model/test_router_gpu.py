"""The router on a GPU: gradients of its products, its choice and the auxiliary losses."""

import pytest
import torch

from fp8.rms_norm import Normed
from fp8.stash import Stash
from model import router as router_module
from model.config import ModelConfig
from model.router import Router

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"),
]
CONFIG = ModelConfig(hidden_size=256, num_experts=128, n_group=8, topk_group=4, num_experts_per_tok=6)


def gradients(balance: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw) of a loss of routing weights and lse, and with `balance` of the logits themselves."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        router = Router(CONFIG)
        x_TD = torch.randn(300, 256).bfloat16().requires_grad_()
        router.weight.set_(torch.randn(128, 256) * 0.1)
        of_weights, of_logits = torch.randn(300, 6), torch.randn(300, 128)
    routing = router(Normed(None, x_TD, Stash().put("x", x_TD), x_TD, None))
    loss = (routing.weights_Tk * of_weights).sum() + routing.lse_T.square().sum()
    if balance:
        loss = loss + (routing.logits_TE * of_logits).sum()
    loss.backward()
    return x_TD.grad, router.weight.main_grad


@pytest.mark.parametrize("balance", [False, True])
def test_one_kernel_makes_dlogits_and_splits_it(balance: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    got = gradients(balance)
    monkeypatch.setattr(router_module, "PendingGradient", lambda: None)  # dlogits by autograd, split afterwards
    want = gradients(balance)
    assert want[0].norm() > 0 and want[1].norm() > 0
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
