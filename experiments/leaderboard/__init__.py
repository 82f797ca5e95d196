"""The leaderboard: all methods of the catalogue on cheap tasks that tell methods apart."""
