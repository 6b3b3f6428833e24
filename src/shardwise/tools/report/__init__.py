"""Code shared by the reports of verify, plan, simulate, scale and timeline.

- look.py        colors and matplotlib style; saves a plot as PNG, and as SVG for a page
- page.py        renders an HTML page from a template that extends page.html.jinja
- output.py      writes JSON files, and collects facts about the machine
"""
