"""What a journal tells as tables and words: data frames, who descends from whom, the winner, runs side by side."""
