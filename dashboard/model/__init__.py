"""The view model: what every front end shows of a run or of a comparison, as frozen dataclasses.

Terminal screens, the HTML report and the web page render these values and compute none of their own. A number has a raw
value for programs and a formatted text for people. Imports neither Textual, FastAPI, Jinja2 nor torch.
"""
