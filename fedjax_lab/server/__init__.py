"""What the server does with the messages of a cohort."""
