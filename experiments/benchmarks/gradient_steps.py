"""Steps of gradient descent on a convolution, in one compiled loop: what its forms are timed on."""

import time

import jax
from jax import lax

STEPS = 5


def compiled_steps(loss, kernel, x, rate):
    """Compile ``STEPS`` steps on the kernel and the images: (kernel, x) -> (kernel, x)."""

    def step(_, carry):
        kernel, x = carry
        slope, by_x = jax.grad(loss, (0, 1))(kernel, x)
        return kernel - rate * slope, x - rate * by_x

    run = jax.jit(lambda *carry: lax.fori_loop(0, STEPS, step, carry))
    return run.lower(kernel, x).compile()


def processor_seconds(run, arguments):
    """Processor seconds of the steps."""
    began = time.process_time()
    jax.block_until_ready(run(*arguments))
    return time.process_time() - began
