"""Compare: every strategy measured side by side on a person's own job, and which of them to take.

In reading order: `entries` (what is to be measured, and against what), `compare` (the turns),
`agreement` (the same numbers?), `result` (what was found, and what follows from it), `advice` (the
one sentence), `comparison_table` (for a terminal, and CSV), `comparison_folder` (what is left of
it), `comparison_page` (the report), `tune` (settings instead of strategies), `timed_run` (a few
updates in fresh processes), `timing` (alternatives in turns), `snapshot` (what each device sees and
does). Nothing is imported here: the command must not wait for torch.
"""
