"""Code shared by the reports of verify, plan, simulate, scale and timeline.

- look.py        colors and matplotlib's style; draws a picture as PNG and as SVG for a page
- page.py        renders a page from a template, on the base page.html.jinja
- output.py      JSON files, facts about the machine
"""
