"""Plans which layers a step recomputes, from what each stage holds at each event: pure integers."""
