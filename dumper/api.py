"""Module-level functions of :mod:`tapscope.dumper`: methods of the process-wide dumper, and the tag context.

::

    from tapscope import dumper

    dumper.dump("q", q, dims="t h[tp]", layer_id=3)
    dumper.step()
"""

from tapscope.dumper.process_dumper import ProcessDumper
from tapscope.dumper.steps import tag_context

process = ProcessDumper()
"""The process-wide dumper."""

attach = register = process.attach
capture_output = process.capture_output
close = process.close
configure = process.configure
configure_default = process.configure_default
ctx = tag_context.ctx
dump = process.dump
dump_dict = process.dump_dict
dump_model = process.dump_model
get_state = process.get_state
may_enable = process.may_enable
metric = process.metric
micro = process.micro
reset = process.reset
set_ctx = tag_context.set_ctx
start = process.start
step = process.step
