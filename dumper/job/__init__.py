"""The job: this process's rank, the directories of its runs, and what is installed for its lifetime."""
