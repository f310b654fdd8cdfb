"""The module-level tools: the same four verbs as ``torch.nn.parallel``, on slots of a CPU as well as on accelerators.

::

    replicas = replicate(module, devices)           one module per device, sharing or copying its parameters
    shares   = scatter(inputs, devices)             cut along a dimension, in the chunks of torch.chunk
    outputs  = parallel_apply(replicas, shares)     at the same time, each on its device
    output   = gather(outputs, devices[0])          put together again, in order

Each can be used alone, for anything that is to run side by side. Below them lie ``team`` (threads that stay),
``random`` (a stream of random numbers per thread) and ``batchnorm`` (statistics over all replicas).
"""

from __future__ import annotations

from lockstep.parallel.apply import parallel_apply
from lockstep.parallel.gather import gather
from lockstep.parallel.replicate import replicate
from lockstep.parallel.scatter import scatter, scatter_kwargs

__all__ = ["gather", "parallel_apply", "replicate", "scatter", "scatter_kwargs"]
