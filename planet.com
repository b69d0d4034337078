0.00010280744006695584 : Mass of the planets (in mstar)
61.69048940327315 : Semi-major axes
0.45027735414959436 : Eccentricities
57.37569856835031 : Inclinaison (deg)
1 : is Inclinaison damping?
1 : planets feel Disk ?
1 : planets feel others ?
0 : Accretion onto planets ?
1.66 : Accretion parameter
0.001 : Maximum mass of the planet
0.4 : Smoothing
1.0 : Region excluded from torque calculation
