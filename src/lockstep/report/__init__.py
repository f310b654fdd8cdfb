"""Reports: one HTML file with everything in it, and the one place that draws charts.

`charts` (what a chart shows, as data, and its drawing), `timelines` (of a pipeline), `canvas` (matplotlib: figures and
files), `page` (sections, figures and tables, made into a page), `ofrun` (the page of one run).
Nothing is imported here.
"""
