"""The job: who this process is within it, where its runs lie, what stands while it lives and when it ends."""
