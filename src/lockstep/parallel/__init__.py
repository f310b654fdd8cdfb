"""The module-level tools: the same four verbs as ``torch.nn.parallel``, on slots of a CPU as well
as on accelerators.

::

    replicas = replicate(module, devices)        one module per device, sharing or copying its parameters
    shares   = scatter(inputs, devices)          cut along a dimension, in the chunks of torch.chunk
    outputs  = parallel_apply(replicas, shares)  at the same time, each on its device
    output   = gather(outputs, devices[0])       put together again, in order

    DataParallel(module, devices)                   all four, in the place of torch.nn.DataParallel
    data_parallel(module, inputs, devices)          the same, once
    trace_shapes()                                  what each replica saw of a batch, as a table

    ParallelLoss(generator, criterion, devices)  output layer and loss on every device, chunk by chunk

Each can be used alone, for anything that is to run side by side. Below them lie
``backward_threads`` (each replica's in its own thread), and the room ``threads``: the pool of
threads, a stream of random numbers for each.
"""

from __future__ import annotations

from lockstep.parallel.data_parallel import Balanced, DataParallel, data_parallel
from lockstep.parallel.gather import gather
from lockstep.parallel.loss.parallel_loss import ParallelLoss
from lockstep.parallel.parallel_apply import parallel_apply
from lockstep.parallel.replicate import replicate
from lockstep.parallel.scatter import scatter, scatter_kwargs
from lockstep.parallel.trace_shapes import Shapes, trace_shapes

__all__ = [
    "Balanced",
    "DataParallel",
    "ParallelLoss",
    "Shapes",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "trace_shapes",
]
