"""Reports: one HTML file with everything in it, and the one place that draws charts.

`charts` (what a chart shows, as data, and its drawing by matplotlib), `page` (sections, figures and
tables, made into a page), `table`. Nothing is imported here.
"""
