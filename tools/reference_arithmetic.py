"""A whole run through the reference arithmetic, on a GPU: what the kernels' losses are compared with.

Every public function of fp8/ takes its reference path, and every FP8 product multiplies dequantised operands in BF16: codes times
powers of two are exact there, and the sums are FP32. Slow; no flag of the product does this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from fp8 import cross_entropy, gemm, grouped_gemm, permute, qk_norm_rope, quantize, residual, rms_norm, route, swiglu

CHOOSERS = [(module, "_kernels") for module in (cross_entropy, permute, qk_norm_rope, quantize, residual, rms_norm, route, swiglu)]
CHOOSERS += [(permute, "_index_kernels"), (permute, "_turning_kernels")]
CONDITIONS = [(rms_norm, "fuses_activation"), (swiglu, "fuses_activation"), (swiglu, "fuses_gradient")]
CONDITIONS += [(cross_entropy, "fuses_gradient"), (gemm, "_is_native"), (grouped_gemm, "_has_kernel")]


@contextmanager
def reference_arithmetic() -> Iterator[None]:
    """Within, no kernel of fp8/ is used, but for the router's split products, the embedding's gradient and the optimizer."""
    with ExitStack() as stack:
        for module, name in CHOOSERS:
            stack.enter_context(patch.object(module, name, lambda *_: None))
        for module, name in CONDITIONS:
            stack.enter_context(patch.object(module, name, lambda *_: False))
        yield
