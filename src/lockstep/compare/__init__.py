"""Compare: every strategy measured side by side on a person's own job, and which of them to take.

In reading order: `planned_rows` (what is measured, and against what), `compare` (the turns),
`timed_run` (a few timed updates, in fresh processes), `timing` (their rates), `agreement` (whether
the numbers are those of one device), `result` (the rows, and what follows from them), `advice` (the
one sentence), `comparison_table` (for a terminal), `comparison_folder` (the files),
`comparison_page` and `sweep_figures` (the report), `tune` (settings instead of strategies).
Nothing is imported here: the command must not wait for torch.
"""
