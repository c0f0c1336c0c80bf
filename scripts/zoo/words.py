"""Vocabulary of the generated records. The held-out lists share no name with the others."""

FIRST = (
    "Ada Alan Amara Anders Aisha Beatriz Bruno Carla Chen Clara Dmitri Elena Emeka Esther Fatima Felix Grace "
    "Hana Hugo Ines Ivan Jamal Joana Karim Kenji Lars Laura Leila Lucas Mara Marie Mateo Mei Mira Nadia Nils "
    "Noor Olga Omar Paula Pedro Priya Rania Rosa Samir Sara Sofia Tariq Tomas Vera Wei Yara Yusuf Zoe"
).split()
LAST = (
    "Adler Alvarez Baker Becker Bianchi Chen Costa Diaz Dubois Eriksen Fischer Fontana Garcia Gupta Haddad "
    "Hansen Ibrahim Ito Jansen Johnson Kaya Keller Kim Kowalski Larsen Lopez Martin Mbeki Meyer Moreau Nakamura "
    "Novak Okafor Olsen Patel Perez Petrov Rossi Sato Schmidt Silva Singh Sokolov Tanaka Torres Vogel Wang Weber "
    "Yilmaz"
).split()
FIRST_HELD_OUT = (
    "Agnes Boris Celia Dorian Edith Farid Greta Harald Irene Jonas Katya Lorenzo Miriam Naveen Oscar Petra "
    "Quentin Ruth Stefan Thea Ursula Viktor"
).split()
LAST_HELD_OUT = (
    "Abbott Bergman Castillo Demir Engel Ferreira Grant Horvat Ivanova Jensen Klein Lindgren Moretti Nwosu "
    "Ortega Park Quinn Ricci Suzuki Tran"
).split()
CITIES = [
    ("Lisbon", "PT", 38.72, -9.14),
    ("Berlin", "DE", 52.52, 13.4),
    ("Oslo", "NO", 59.91, 10.75),
    ("Madrid", "ES", 40.42, -3.7),
    ("Nairobi", "KE", -1.29, 36.82),
    ("Lima", "PE", -12.05, -77.04),
    ("Osaka", "JP", 34.69, 135.5),
    ("Toronto", "CA", 43.65, -79.38),
    ("Austin", "US", 30.27, -97.74),
    ("Pune", "IN", 18.52, 73.86),
    ("Accra", "GH", 5.6, -0.19),
    ("Porto", "PT", 41.15, -8.61),
    ("Lyon", "FR", 45.76, 4.84),
    ("Turin", "IT", 45.07, 7.69),
    ("Seoul", "KR", 37.57, 126.98),
    ("Quito", "EC", -0.18, -78.47),
    ("Boston", "US", 42.36, -71.06),
    ("Gdansk", "PL", 54.35, 18.65),
    ("Hanoi", "VN", 21.03, 105.85),
    ("Perth", "AU", -31.95, 115.86),
]
STREETS = "Main Oak Park Hill Lake Church Station Mill River Garden Market School North Bridge King".split()
PRODUCTS = (
    "wireless mouse|mechanical keyboard|usb-c cable|desk lamp|notebook|water bottle|backpack|coffee mug|"
    "office chair|monitor stand|phone case|headphones|web camera|power adapter|travel pillow|running shoes|"
    "rain jacket|yoga mat|board game|picture frame|tea kettle|cutting board|garden hose|tool box"
).split("|")
COLORS = "black white red blue green grey silver navy orange purple".split()
WORDS = (
    "alpha beta gamma delta core edge main stage prod test blue green north south east west fast slow primary backup"
).split()
SERVICES = (
    "auth billing search catalog checkout gateway inventory mailer metrics notifier orders payments profile "
    "scheduler uploader worker"
).split()
SUBJECTS = (
    "Algorithms Statistics Gardening Astronomy Cooking Networks History Chemistry Painting Music Economics Geometry"
).split()
TITLES = ["Introduction to", "Handbook of", "The Art of", "Practical", "Foundations of", "A Guide to"]
TAGS = (
    "new sale vip beta internal urgent archived featured draft verified premium seasonal fragile bulk eco imported"
).split()
MESSAGES = [
    "connection established",
    "connection reset by peer",
    "request completed",
    "request timed out after {n} ms",
    "retrying in {n} seconds",
    "cache miss for key user:{n}",
    "cache hit for key item:{n}",
    "user {n} logged in",
    "user {n} logged out",
    "invalid token for session {n}",
    "worker {n} started",
    "worker {n} stopped",
    "processed {n} records",
    "failed to parse line {n}",
    "disk usage at {n} percent",
    "scheduled job {n} finished",
    "queue length is {n}",
    "permission denied for user {n}",
]
