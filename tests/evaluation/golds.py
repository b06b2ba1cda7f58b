# ruff: noqa: E501
r"""Right answers of real kinds, as data sets write them, and answers that are not the same."""

SAME = r"""
0|1|-1|7|073|42|1000|123456789|2024|-17|+5|3.5|0.5|.5|-0.25|3.14159|0.333|1e5|1e-5|2.5E-3|6.02e23
1,000|12,345,678|1,234.50|1 000|1\,000|€5|$5|\$5|\$1,000.50|£3.20|5 dollars|18 dollars.|5 million|€1 000
1/2|-3/4|22/7|\frac12|\frac{1}{2}|\dfrac{3}{4}|-\frac{5}{6}|\tfrac13|\frac{22}{7}|3\frac{1}{2}|3 1/2|\frac{x+1}{x-1}
50%|50\%|12.5\%|0.05\%|33 \frac{1}{3}\%|5 percent
\sqrt3|\sqrt{3}|2\sqrt{3}|\sqrt[3]{5}|\frac{\sqrt{2}}{2}|\frac{1+\sqrt5}{2}|3+2\sqrt{2}|\sqrt{2+\sqrt{3}}
\pi|3\pi|\frac{\pi}{4}|2\pi r|\pi r^2|3π|e|e^2|e^{i\pi}|\ln 2|\log_2 8|\log_{10} 5|\sin x|\cos 2x|\tan\theta|sin x|\arcsin\frac12
2^{10}|10^{100}|2^{2024}|7^{2012}-1|10^{-5}|2^{2^{5}}|3^{3^{3}}|9^{9^{9^9}}|100!|10!|\binom{10}{3}|10**5
x|y|n|A|B|C|D|(A)|\text{(B)}|E.|ABC|AC|BADC|A, C|\text{A}
x+1|1+x|2xy|2yx|x^2+2x+1|(x+1)^2|x^3-x|2x^2-3x+1|a+b|ab+bc|abc|4abc|n(n+1)/2|\frac{n(n+1)}{2}|n2^{n-1}|2n+1|a_1+a_2|x_1x_2|-x|x-y
(1,2)|(1, 2)|[1,2]|[1, 2)|(-\infty, 3]|(-\infty,-1)\cup(1,\infty)|(1,2,3)|(x,y)|\left(\frac12, 3\right)|(-2, 5)
\{1,2\}|\{1, 2, 3\}|\{-1,1\}|\emptyset|\mathbb{R}|1, 2|1 and 2|2 or 3|1,2,3|\pm 2|\{a,b\}
\begin{pmatrix}1&2\\3&4\end{pmatrix}|\begin{pmatrix} 1 \\ 2 \end{pmatrix}|\begin{bmatrix}a&b\\c&d\end{bmatrix}|\begin{vmatrix}1&0\\0&1\end{vmatrix}
x=5|x = 5|y = 2x + 1|x + 2y = 5|x^2 + y^2 = 10|x=1, y=2|x = 2 or x = 3|f(x)=x^2|a=b=c|x>3|x \ge 3|1 < x < 2|x \neq 0|f(2) = 5
5 km|5 cm|5\text{ cm}|5~\mathrm{m}|5 m/s|5\text{ m/s}^2|5 cm^2|10 \text{ kg}|30 minutes|2 hours 30 minutes|1 h 30 min|2\text{ hours }30\text{ minutes}|5 ft 6 in
90^\circ|90°|37 °C|45^{\circ}|60 degrees|5 + 3i|3i|3\mathrm{i}|1010_2|\text{FF}_{16}|2:3|1:2|3 : 4 : 5|17 r 3|3 remainder 2
10:00 am|10:00 pm|12:30|9:05 a.m.|23:59:59|2024-05-01|05/01/2024|1.5.2024|May 1, 2024|Monday|July|1999 BC
Paris|New York|\text{Paris}|yes|No|true|False|none|listen|DOG|Москва|東京|São Paulo|O'Brien|Jean-Luc|twenty-one|not enough information
CO2|H2O|H_2O|\mathrm{H_2O}|NaCl|C6H12O6|\text{CO}_2|SO_4^{2-}|Ca(OH)_2|covid19|GPT-4|B12|abc123|A1B2|x86|0x1F|3D|R2D2|ISO-9001
The answer is 5|half of 10|the point (3, 4)|x² + 1|≥ 3|<1, 2>|3 · 4|3 × 4|10 \bmod 3|3 \pmod{7}|\angle ABC|\triangle ABC|AB \parallel CD|\overline{AB}|\lfloor x \rfloor|\sum_{k=1}^n k|\int_0^1 x dx|\lim_{x\to0}\frac{\sin x}{x}
"""
GOLDS = [gold for line in SAME.strip().splitlines() for gold in line.split("|")]

OTHER = r"""
BADC|ABCD;listen|silent;DOG|GOD;dog|god;no|on;AB|BA;NaCl|ClNa;New York|York New;act now|cat now;twenty-one|one-twenty;Jean-Luc|Luc-Jean
CO2|2;CO2|OC2;2|CO2;H2O|OH2;H_2O|OH_2;C2H6|H6C2;covid19|19;19|covid19;covid19|covid91;B12|12;A1B2|B2A1;abc123|bca123;GPT-4|-4;x86|86
\text{CO}_2|\text{OC}_2;Ca(OH)_2|Ca(HO)_2;\angle ABC|\angle BCA;3D|3;R2D2|D2R2
10:00 am|10:00 pm;10:00|10;12:30|4:10;12:30|2:5;10:00|9:00;10:00 am|10;9:05 a.m.|9:05 p.m.;10 am|10 pm;10\text{ am}|10\text{ pm}
2024-05-01|2024-01-05;2024-05-01|2018;05/01/2024|10/2/2024;5/1/2024|5/2024;May 1, 2024|May 2, 2024;1 May 2024|2024 May 1
5 km|5 m;5 m|5 s;5m|5s;5\text{ m}|5\text{ s};5\text{ cm}|5 mm;5 m/s|5 s/m;5 m^2|5 m^3;5 cm^2|5 cm^3;5\text{ m}^2|5\text{ m}^3
5 dollars|5 euros;30 minutes|30 hours;5 mph|5 hmp;5 million|5;5 million|5 billion;5~\mathrm{kg}|5~\mathrm{g};37 °C|37 °F
2 hours 30 minutes|30 hours 2 minutes;5 km 3 m|3 km 5 m;5 ft 6 in|6 ft 5 in;1 h 30 min|30;5 dogs and 3 cats|3 dogs and 5 cats
3 1/2|3/2;3 1/2|31/2;1 000|0;5|6;2xy|xy;\frac12|2;\sqrt3|3;x+1|x-1;(1,2)|(2,1);[1,2)|(1,2];1010_2|10102;x=5|y=5;3 \bmod 7|7 \bmod 3
3 remainder 2|2 remainder 3;17 r 3|3 r 17;half of 10|10;The answer is 5|5;true|false;yes|no;9^{9^{9^9}}|9
"""
DIFFERENT = [tuple(pair.split("|")) for line in OTHER.strip().splitlines() for pair in line.split(";")]

EQUAL = r"""
\frac12|0.5;\frac{1}{2}|1/2;0.5|\frac12;\sqrt{12}|2\sqrt{3};x+1|1+x;2xy|2yx;x^2+2x+1|(x+1)^2;a(b+c)|ab+ac;\frac{ab}{2}|ab/2;n2^{n-1}|n \cdot 2^{n-1}
1,000|1000;1 000|1000;1\,000|1000;1e5|100000;100000|10^5;073|73;5.0|5;2^{10}|1024;10!|3628800;\binom{5}{2}|10;5\%|0.05
5|5 cm;5|5\text{ cm};5 cm|5\text{ cm};5\text{ km}|5~\mathrm{km};5 m/s|5\text{ m/s};90^\circ|90;\$5|5;5|\$5;5 dollars|\text{5 dollars};5\text{ cm}|5
x=5|5;5|x=5;y = 2x+1|2x+1;y=2x+1|y=1+2x;\{1,2\}|\{2,1\};1, 2|2, 1;1 and 2|1, 2;(1,2)|(1, 2);(-\infty,3]|(-\infty, 3];x > 3|3 < x
\text{Paris}|paris;New York|\text{new york};A|\text{A};(A)|A;\text{(B)}|B;\mathrm{H_2O}|\text{H}_2\text{O};10:00 am|10:00 AM;10:00 am|10:00\text{ am}
\sin x|\sin(x);2\sin x\cos x|\sin 2x;\sin^2 x + \cos^2 x|1;\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix} 1 \\ 2 \end{pmatrix};3i|3\mathrm{i};\dfrac34|\frac{3}{4}
"""
ALIKE = [tuple(pair.split("|")) for line in EQUAL.strip().splitlines() for pair in line.split(";")]
