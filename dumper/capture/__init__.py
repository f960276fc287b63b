"""Capture: from a value at a site to a record in the send queue.

``Capturer`` decides what is kept and splits unusual tensors; its ``HostCapturer`` or a ``DeviceCapturer`` measures and
copies one dense tensor; ``RecordQueue`` numbers the record and queues it. ``NativeRecordWriter`` does all of that in
C++ for ordinary tensors in host memory.
"""
