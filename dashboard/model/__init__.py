"""View model: everything that front ends show of a run or comparison, as frozen dataclasses.

Terminal screens, the HTML report and the web page only render these values and compute no values themselves. A number
has a raw value for programs and a formatted text for users. Imports neither Textual, FastAPI, Jinja2 nor torch.
"""
