"""Verify compares a job under ``single`` and under a strategy, from the same weights on the same
batches, and finds why they differ.

::

    verdict       how the answer is found                  verification  the answer, as a table
    preflight     in which number format, how large a batch
    batches       which batches, of the job's own loader   training_run  one side, an update at a time
    paired_run    both at once, compared after each update comparison    what is compared, and what was found
    measures      how far two values lie apart             layer_watch   the first layer that gave other values
    experiments   where experiments run, and noise there   determinism   dropout, draws, or batch norms, taken out
    cause_search  the experiments that find a cause        batch_cut     what micro-batches alone change
    cause_texts   the table of causes: kind, text, fix
"""

from lockstep.verify.comparison import Comparison, Update
from lockstep.verify.verdict import verify
from lockstep.verify.verification import Verification

__all__ = ["Comparison", "Update", "Verification", "verify"]
