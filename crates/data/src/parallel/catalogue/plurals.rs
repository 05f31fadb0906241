//! Which of a message's forms stands for one thing, and which for several.
//!
//! A header has a rule such as `nplurals=3; plural=n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 ? 1 : 2;`, an
//! expression of C in n. It is evaluated for some numbers, and then (see [`Plurals::number`]) a form goes with the English
//! singular or the English plural, or with none: that of Arabic for two things says "two files" where English has
//! "%d files", or worse, "files".

use super::FORMS_MAX;

/// No rule is longer than this, in bytes.
const RULE_BYTES_MAX: usize = 2000;

/// No expression is nested deeper than this.
const DEPTH_MAX: usize = 40;

/// Numbers that tell the forms of known languages apart, each form of any number of things several times.
const SAMPLES: [u64; 36] = [
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 19, 20, 21, 22, 25, 40, 60, 99, 100, 101,
    102, 103, 105, 111, 122, 200, 201, 202, 1_000, 1_000_000,
];

/// What an English text speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::parallel) enum Number {
    /// One thing: `msgid`.
    One,
    /// Several: `msgid_plural`.
    Several,
}

/// The forms of a language.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::parallel) struct Plurals(Vec<Option<Number>>);

impl Plurals {
    /// Out of a header's `Plural-Forms`; without one it is as in English. None if it makes no sense.
    pub(in crate::parallel) fn parse(rule: Option<&str>) -> Option<Plurals> {
        let rule = rule.unwrap_or("nplurals=2; plural=(n != 1);");
        if rule.len() > RULE_BYTES_MAX {
            return None;
        }
        let field = |name| {
            rule.split(';').find_map(|part| {
                Some(part.trim().strip_prefix(name)?.trim_start().strip_prefix('=')?.trim())
            })
        };
        let count: usize =
            field("nplurals")?.parse().ok().filter(|count| (1..=FORMS_MAX).contains(count))?;
        let expression = field("plural")?;
        let mut numbers = vec![Vec::new(); count];
        for n in SAMPLES {
            let form = usize::try_from(evaluate(expression, n)?).ok()?;
            numbers.get_mut(form)?.push(n);
        }
        Some(Plurals(numbers.iter().map(|numbers| number(numbers)).collect()))
    }

    /// What the English text of a form speaks of, where the form is of `forms`. None where neither text is sound.
    pub(in crate::parallel) fn number(&self, form: usize, forms: usize) -> Option<Number> {
        if forms == self.0.len() { *self.0.get(form)? } else { None }
    }
}

/// What a form that is used for these numbers goes with:
/// - of 1, and not of 5: with the singular, though some languages use it for 21 or 0, too;
/// - of several numbers: with the plural. So is the only form of languages without number;
/// - of a single number but 1 (none, two): with neither, for it need not name the number and English must.
fn number(numbers: &[u64]) -> Option<Number> {
    match (numbers.contains(&1), numbers.contains(&5)) {
        (true, false) => Some(Number::One),
        _ if numbers.len() > 1 => Some(Number::Several),
        _ => None,
    }
}

/// The value of an expression, if it is one.
fn evaluate(expression: &str, n: u64) -> Option<u64> {
    let mut parser = Parser { rest: expression, n, depth: 0 };
    let value = parser.choice()?;
    parser.rest.trim_start().is_empty().then_some(value)
}

/// Binary operators from the loosest to the tightest; in a row the longer ones first.
const LEVELS: [&[&str]; 6] =
    [&["||"], &["&&"], &["==", "!="], &["<=", ">=", "<", ">"], &["+", "-"], &["*", "/", "%"]];

/// Computes while it reads: C evaluates no side here that could fail but a division, and that fails the rule.
struct Parser<'a> {
    rest: &'a str,
    n: u64,
    depth: usize,
}

impl Parser<'_> {
    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// `condition ? value : choice`
    fn choice(&mut self) -> Option<u64> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return None;
        }
        let condition = self.binary(0)?;
        let value = if self.take("?") {
            let then = self.choice()?;
            let otherwise = if self.take(":") { self.choice()? } else { return None };
            if condition != 0 { then } else { otherwise }
        } else {
            condition
        };
        self.depth -= 1;
        Some(value)
    }

    fn binary(&mut self, level: usize) -> Option<u64> {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        while let Some(operator) = operators.iter().find(|operator| self.take(operator)) {
            let right = self.binary(level + 1)?;
            left = apply(operator, left, right)?;
        }
        Some(left)
    }

    fn unary(&mut self) -> Option<u64> {
        let mut is_negated = false;
        let mut is_boolean = false;
        while self.take("!") {
            is_negated = !is_negated;
            is_boolean = true;
        }
        let value = self.primary()?;
        Some(if is_boolean { u64::from((value == 0) == is_negated) } else { value })
    }

    fn primary(&mut self) -> Option<u64> {
        if self.take("(") {
            let value = self.choice()?;
            return self.take(")").then_some(value);
        }
        if self.take("n") {
            return Some(self.n);
        }
        let text = self.rest.trim_start();
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, rest) = text.split_at_checked(end)?;
        self.rest = rest;
        digits.parse().ok()
    }
}

fn apply(operator: &str, left: u64, right: u64) -> Option<u64> {
    Some(match operator {
        "||" => u64::from(left != 0 || right != 0),
        "&&" => u64::from(left != 0 && right != 0),
        "==" => u64::from(left == right),
        "!=" => u64::from(left != right),
        "<=" => u64::from(left <= right),
        ">=" => u64::from(left >= right),
        "<" => u64::from(left < right),
        ">" => u64::from(left > right),
        "+" => left.checked_add(right)?,
        "-" => left.checked_sub(right)?,
        "*" => left.checked_mul(right)?,
        "/" => left.checked_div(right)?,
        _ => left.checked_rem(right)?,
    })
}

#[cfg(test)]
mod tests {
    use super::Number::{One, Several};
    use super::*;

    fn numbers(rule: &str) -> Vec<Option<Number>> {
        Plurals::parse(Some(rule)).unwrap_or_else(|| panic!("{rule}")).0
    }

    #[test]
    fn oracle_forms_of_languages() {
        let rules: [(&str, &[Option<Number>]); 8] = [
            ("nplurals=2; plural=(n != 1);", &[Some(One), Some(Several)]),
            ("nplurals=2; plural=(n > 1)", &[Some(One), Some(Several)]),
            ("nplurals=1; plural=0;", &[Some(Several)]),
            (
                "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);",
                &[Some(One), Some(Several), Some(Several)],
            ),
            (
                "nplurals=3; plural=(n==1) ? 0 : (n>=2 && n<=4) ? 1 : 2;",
                &[Some(One), Some(Several), Some(Several)],
            ),
            // Slovenian, where older catalogues begin with the form of five.
            (
                "nplurals=4; plural=(n%100==1 ? 1 : n%100==2 ? 2 : n%100==3 || n%100==4 ? 3 : 0);",
                &[Some(Several), Some(One), Some(Several), Some(Several)],
            ),
            // Arabic: nothing, one, two, few, many, and the rest.
            (
                "nplurals=6; plural=n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5;",
                &[None, Some(One), None, Some(Several), Some(Several), Some(Several)],
            ),
            // A rule that says 2 and means 1.
            ("nplurals=2; plural=0;", &[Some(Several), None]),
        ];
        for (rule, expected) in rules {
            assert_eq!(numbers(rule), expected, "{rule}");
        }
    }

    #[test]
    fn oracle_expressions_are_those_of_c() {
        for (expression, value) in [
            ("1+2*3", 7),
            ("(1+2)*3", 9),
            ("10-2-3", 5),
            ("1 ? 2 : 0 ? 3 : 4", 2),
            ("0 ? 2 : 0 ? 3 : 4", 4),
            ("!0", 1),
            ("!!7", 1),
            ("!n", 0),
            ("7%4/2", 1),
            ("1 || 0 && 0", 1),
            ("2 < 3 == 1", 1),
            ("n", 5),
        ] {
            assert_eq!(evaluate(expression, 5), Some(value), "{expression}");
        }
    }

    #[test]
    fn fault_rules_that_make_no_sense() {
        let deep = format!("nplurals=2; plural={}n", "(".repeat(1000));
        let long = format!("nplurals=2; plural={}", "!".repeat(1_000_000));
        for rule in [
            "",
            "nplurals=2",
            "plural=0",
            "nplurals=0; plural=0",
            "nplurals=99999999999; plural=0",
            "nplurals=2; plural=2",
            "nplurals=2; plural=n/0",
            "nplurals=2; plural=(n",
            "nplurals=2; plural=n n",
            "nplurals=2; plural=m",
            "nplurals=2; plural=n ? 1",
            "nplurals=2; plural=99999999999999999999",
            "nplurals=INTEGER; plural=EXPRESSION;",
            &deep,
            &long,
        ] {
            assert_eq!(Plurals::parse(Some(rule)), None, "{:.60}", rule);
        }
    }

    #[test]
    fn oracle_a_form_of_another_number_of_forms_goes_with_nothing() {
        let plurals = Plurals::parse(None).unwrap();
        assert_eq!(plurals.number(1, 2), Some(Several));
        assert_eq!(plurals.number(1, 3), None);
    }
}
