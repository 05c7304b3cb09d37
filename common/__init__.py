"""What a site and the coordinator must agree on."""
