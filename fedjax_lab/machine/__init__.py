"""What a program runs on: its devices and their memory, and what their compiler says of it."""
