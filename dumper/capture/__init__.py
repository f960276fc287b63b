"""Capture: turns a value at a site into a record in the send queue.

``Capturer`` applies the rules and splits unusual tensors into parts. ``HostCapturer`` or ``DeviceCapturer`` measures
and copies one dense tensor. ``RecordQueue`` numbers the record and queues it. ``NativeRecordWriter`` does all of this
in C++ for ordinary tensors.
"""
