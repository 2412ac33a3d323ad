"""Host-side arithmetic of kernel launches. Triton's own `cdiv` unwraps compile-time values and costs more than some launches."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()
