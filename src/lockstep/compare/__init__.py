"""Compare: every strategy measured side by side on a person's own job, and which of them to take.

In reading order: `entries` (what is to be measured, and against what), `measure` (the turns), `agreement` (the same
numbers?), `result` (what was found, and what follows from it), `advice` (the one sentence), `table` (for a terminal,
and CSV), `record` (what is left of it), `pages` (the report), `peers` (the same job by other means). `commands` are the
words of the command. Nothing is imported here: the command must not wait for torch.
"""
