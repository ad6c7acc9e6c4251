"""Examples that come with Punica: adapters of the demo model, how they were trained, clients."""
