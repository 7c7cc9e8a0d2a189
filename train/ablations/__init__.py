"""The paper's comparisons at the scale of the demo pair."""
