"""The job: this process's rank, the directories of its runs, and the hooks installed for its lifetime."""
